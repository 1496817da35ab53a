"""Subcommands that measure, calibrate and describe checkpoints."""
