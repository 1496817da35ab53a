"""The operator's options for a checkpoint, which complete or override its own content."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter

from model.checkpoint.labels import LABEL_PRESETS, read_labels
from model.checkpoint.local_files import (
    advising,
    parsed_json,
    read_json,
    resolved_source,
    validating,
)
from model.config import PreprocessConfig
from model.errors import CheckpointError
from model.layer_config import Size

# Published evaluation preprocessing of released models, by name. Sources:
# torchvision/models/vision_transformer.py, `ViT_*_Weights`; google-research/vision_transformer,
# vit_jax/input_pipeline.py; facebookresearch/deit, datasets.py, `build_transform`.
PREPROCESS_PRESETS: Final[dict[str, PreprocessConfig]] = TypeAdapter(
    dict[str, PreprocessConfig]
).validate_json(
    resources.files("model.checkpoint").joinpath("preprocess_presets.json").read_bytes()
)

# Advice in a refusal of the preprocessing that a file states.
SET_PREPROCESS: Final = "; VIT_PREPROCESS sets the preprocessing instead"


@dataclass(frozen=True)
class CheckpointOptions:
    """Options of the operator that complete or override a checkpoint.

    Attributes:
        image_size: (rows, columns) in pixels to run at instead of the checkpoint's own.
        preprocess: one of `PREPROCESS_PRESETS` or a JSON file instead of the checkpoint's own
            preprocessing; required by formats that carry none.
        labels: names, a file or a preset, instead of the checkpoint's own labels; see
            `model.checkpoint.labels`.
        activation: `softmax` or `sigmoid`, instead of the checkpoint's own.
        architecture: for a plain state dict, a name of timm such as `vit_base_patch16_224`, or
            `vit` for a network whose tensors tell its sizes.
        keys: for a plain state dict, a TOML file with new names of tensors.
        base: source of the checkpoint that an adapter adapts, instead of the base that it names.
        bases_below: folders, one of which must contain the base that an adapter names; None allows
            any folder.
        hub_bases: whether the base that an adapter names may be a hub id instead.
    """

    image_size: Size | None = None
    preprocess: str | None = None
    labels: str | None = None
    activation: str | None = None
    architecture: str | None = None
    keys: str | None = None
    base: str | None = None
    bases_below: Sequence[Path] | None = None
    hub_bases: bool = False

    def preprocess_or(
        self,
        default: PreprocessConfig | None,
        where: str,
        missing: str = "carries no preprocessing:",
    ) -> PreprocessConfig:
        """Return the operator's preprocessing, else `default`.

        Args:
            default: the checkpoint's own preprocessing.
            where: name of the checkpoint in messages.
            missing: start of the message if there is neither.

        Raises:
            CheckpointError: there is neither, or the operator's cannot be read.
        """
        if self.preprocess is not None:
            return read_preprocess(self.preprocess)
        if default is None:
            presets = ", ".join(PREPROCESS_PRESETS)
            raise CheckpointError(
                f"{where}: {missing} set VIT_PREPROCESS to a JSON file or to one of {presets}"
            )
        return default

    def labels_or(
        self, default: tuple[str, ...] | None, classes: int, where: str
    ) -> tuple[str, ...]:
        """Return the operator's labels, else `default`; no labels for a model without classes.

        Raises:
            CheckpointError: there is neither, or the operator's cannot be read or have another
                number.
        """
        if not classes:
            return ()
        if self.labels is not None:
            return read_labels(self.labels, classes)
        if default is None:
            raise CheckpointError(
                f"{where}: no labels for its {classes} classes: set VIT_LABELS to a file, to names "
                f"like cat,dog or to one of {', '.join(LABEL_PRESETS)}"
            )
        return default


def read_preprocess(name: str) -> PreprocessConfig:
    """Return the preprocessing that a preset, a JSON object or a JSON file describes.

    Args:
        name: one of `PREPROCESS_PRESETS`, or a file or text with the fields of `PreprocessConfig`.

    Raises:
        CheckpointError: neither a preset nor a file, or fields that are missing, unknown or wrong.
    """
    if name in PREPROCESS_PRESETS:
        return PREPROCESS_PRESETS[name]
    if name.startswith("{"):
        return _validated(parsed_json(name, "VIT_PREPROCESS"), "VIT_PREPROCESS")
    path = Path(name).expanduser()
    if resolved_source(path, str(path)) is None:
        raise CheckpointError(
            f"VIT_PREPROCESS {name!r}: neither a file nor one of {', '.join(PREPROCESS_PRESETS)}"
        )
    return _validated(read_json(path, str(path)), str(path))


def _validated(fields: Any, where: str) -> PreprocessConfig:
    """Return the preprocessing of these fields; the refusal shows an example of all fields."""
    example = PREPROCESS_PRESETS["deit-224"].model_dump_json(exclude_defaults=True)
    advice = f"; expected fields like these, not those of another library: {example}"
    with advising(advice), validating(where):
        return PreprocessConfig.model_validate(fields)
