"""Kept pictures in Redis, which all replicas of a service share."""
