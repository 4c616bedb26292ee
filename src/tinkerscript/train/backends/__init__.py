"""What trains and samples a run: the embedded engine, or a service that speaks Tinker's protocol."""
