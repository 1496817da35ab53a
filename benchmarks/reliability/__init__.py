"""A real service under mixed traffic: while it is hurt (`chaos`), and for long (`soak`)."""
