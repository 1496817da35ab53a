"""Checkpoints from the Hugging Face Hub, by id, through its client (the optional extra `hub`)."""

from model.extension import Extension

EXTENSION = Extension(name="hub", sources=(f"{__name__}.repository:open_id",))
