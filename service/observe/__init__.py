"""Metrics and logs for operators."""
