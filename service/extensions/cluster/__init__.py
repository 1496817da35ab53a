"""The service in several processes: supervisor, web workers, engine processes, and what they share."""
