"""The service in several processes: a supervisor, web workers, and engine processes."""
