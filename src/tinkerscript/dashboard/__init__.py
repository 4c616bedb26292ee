"""What people look at while a run goes on, and at its end. It only renders; it decides nothing."""
