"""Checkpoints in other forms than the core's folders; see `Extension.readers` for their order."""

from model.extension import Extension

EXTENSION = Extension(
    name="formats",
    readers=tuple(
        f"{__name__}.{module}:read"
        for module in ("lora", "sentence_transformers", "open_clip", "jax_npz", "state_dict")
    ),
)
