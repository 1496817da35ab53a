"""Models by name: loading, replacing and closing them. Today a service has one name."""
