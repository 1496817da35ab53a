"""Adds `vitserve convert`."""

from service.extension import Command, Extension

EXTENSION = Extension(
    name="convert",
    commands={
        "convert": Command(
            "service.extensions.formats.convert",
            "write a checkpoint as vitserve's own folder",
            example="vitserve convert bundled -o folder",
            synonyms=("export", "save"),
        ),
    },
)
