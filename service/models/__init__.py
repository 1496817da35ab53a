"""Models by name: how requests hold them, and how they are loaded, replaced and closed.

`version` describes the life of one version; docs/models.md has an example.
"""
