"""Checkpoints and labels in other forms than the core's; see `Extension` for their order."""

from model.extension import Extension

EXTENSION = Extension(
    name="formats",
    readers=tuple(
        f"{__name__}.{module}:read"
        for module in ("lora", "sentence_transformers", "open_clip", "jax_npz", "state_dict")
    ),
    label_readers=tuple(
        f"{__name__}.{module}:read" for module in ("label_yaml", "label_tables", "label_lines")
    ),
)
