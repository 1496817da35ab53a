"""Explanations of answers, computed from forward and backward passes."""
