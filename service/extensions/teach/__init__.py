"""Heads that the service learns from labelled pictures: their examples, the fit, and what a head
knows of itself.
"""
