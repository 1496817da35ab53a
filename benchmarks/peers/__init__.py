"""vitserve side by side with other model servers. See ../README.md."""
