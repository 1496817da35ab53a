"""Models by name: how requests hold them, and how they are loaded, replaced and closed.

`version` has the life of one version; docs/models.md tells it by an example.
"""
