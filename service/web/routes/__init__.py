"""Routes, one file a family of endpoints."""
