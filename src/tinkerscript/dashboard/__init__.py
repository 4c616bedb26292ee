"""What people look at during a run and at its end. It only renders."""
