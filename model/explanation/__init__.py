"""Explanations computed from forward and backward passes."""
