"""Replicas of the service on Ray Serve."""
