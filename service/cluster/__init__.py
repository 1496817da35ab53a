"""The wing of several processes: supervisor, web workers, engine processes, and what they share."""
