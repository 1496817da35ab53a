"""What the operator says beside the checkpoint: input size, and what formats without a config lack."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from model.checkpoint.files import read_json_value
from model.config import PreprocessConfig, Size
from model.errors import CheckpointError, first_problem

IMAGENET_MEAN: Final = (0.485, 0.456, 0.406)
IMAGENET_STD: Final = (0.229, 0.224, 0.225)
HALF: Final = (0.5, 0.5, 0.5)


def _preset(size: int, resize: str, resize_size: int, interpolation: str, *statistics: Any) -> PreprocessConfig:
    return PreprocessConfig.model_validate(
        {
            "size": (size, size),
            "resize": resize,
            "resize_size": (resize_size, resize_size),
            "interpolation": interpolation,
            "mean": statistics[0],
            "std": statistics[1],
        }
    )


PREPROCESS_PRESETS: Final[dict[str, PreprocessConfig]] = {
    # torchvision/models/vision_transformer.py, ViT_*_Weights
    "torchvision-224": _preset(224, "shortest_edge", 256, "bilinear", IMAGENET_MEAN, IMAGENET_STD),
    "torchvision-l16-224": _preset(224, "shortest_edge", 242, "bilinear", IMAGENET_MEAN, IMAGENET_STD),
    "torchvision-swag-384": _preset(384, "shortest_edge", 384, "bicubic", IMAGENET_MEAN, IMAGENET_STD),
    "torchvision-swag-512": _preset(512, "shortest_edge", 512, "bicubic", IMAGENET_MEAN, IMAGENET_STD),
    "torchvision-swag-518": _preset(518, "shortest_edge", 518, "bicubic", IMAGENET_MEAN, IMAGENET_STD),
    "torchvision-swag-linear-224": _preset(224, "shortest_edge", 224, "bicubic", IMAGENET_MEAN, IMAGENET_STD),
    # google-research/vision_transformer, vit_jax/input_pipeline.py: squashed, scaled to -1...1
    "google-224": _preset(224, "squash", 224, "bilinear", HALF, HALF),
    "google-384": _preset(384, "squash", 384, "bilinear", HALF, HALF),
    # facebookresearch/deit, datasets.py: build_transform
    "deit-224": _preset(224, "shortest_edge", 256, "bicubic", IMAGENET_MEAN, IMAGENET_STD),
}
"""Published evaluation preprocessing of released models, by name."""

LABEL_PRESETS: Final = ("imagenet-1k", "numbers")
"""`imagenet-1k`: the 1,000 classes of ILSVRC 2012 in their usual order; `numbers`: each class's index."""


@dataclass(frozen=True)
class Options:
    """What may be said beside the checkpoint.

    Attributes:
        image_size: (rows, columns) in pixels to run at instead of the checkpoint's own.
        preprocess: a preset's name or a JSON file, instead of the checkpoint's own.
        labels: a preset's name or a file, instead of the checkpoint's own.
        architecture: a timm name, for plain state dicts.
    """

    image_size: Size | None = None
    preprocess: str | None = None
    labels: str | None = None
    architecture: str | None = None

    def preprocess_or(self, default: PreprocessConfig | None, where: str) -> PreprocessConfig:
        """The operator's choice, else `default`.

        Raises:
            CheckpointError: neither, or a choice that cannot be read.
        """
        if self.preprocess is not None:
            return read_preprocess(self.preprocess)
        if default is None:
            raise CheckpointError(
                f"{where}: this format carries no preprocessing: set VIT_PREPROCESS to a JSON file "
                f"or to one of {', '.join(PREPROCESS_PRESETS)}"
            )
        return default

    def labels_or(self, default: tuple[str, ...] | None, classes: int, where: str) -> tuple[str, ...]:
        """The operator's choice, else `default`.

        Raises:
            CheckpointError: neither, or a choice that cannot be read or is of another length.
        """
        if self.labels is not None:
            return read_labels(self.labels, classes)
        if default is None:
            raise CheckpointError(
                f"{where}: no labels for its {classes} classes: set VIT_LABELS to a file "
                f"or to one of {', '.join(LABEL_PRESETS)}"
            )
        return default


def read_preprocess(name: str) -> PreprocessConfig:
    """A preset by name, or a JSON file with the fields of `model.config.PreprocessConfig`.

    Raises:
        CheckpointError: neither a preset nor a file, or fields that are missing, unknown or wrong.
    """
    if name in PREPROCESS_PRESETS:
        return PREPROCESS_PRESETS[name]
    path = Path(name).expanduser()
    if not path.is_file():
        raise CheckpointError(f"VIT_PREPROCESS {name!r}: neither a file nor one of {', '.join(PREPROCESS_PRESETS)}")
    try:
        return PreprocessConfig.model_validate(read_json_value(path))
    except ValidationError as error:
        raise CheckpointError(f"{path}: {first_problem(error)}") from None


def read_labels(name: str, classes: int) -> tuple[str, ...]:
    """A preset by name, a JSON file (a list, or an object from index to label), or a text file, one a line.

    Raises:
        CheckpointError: neither a preset nor a file, or not exactly `classes` labels.
    """
    if name == "numbers":
        return tuple(str(index) for index in range(classes))
    if name == "imagenet-1k":
        return _counted(imagenet_labels(), classes, "imagenet-1k")
    path = Path(name).expanduser()
    if not path.is_file():
        raise CheckpointError(f"VIT_LABELS {name!r}: neither a file nor one of {', '.join(LABEL_PRESETS)}")
    if path.suffix.lower() == ".json":
        value = read_json_value(path)
        if isinstance(value, dict):
            return indexed_labels(value, classes, str(path))
        if not isinstance(value, list) or not all(isinstance(label, str) for label in value):
            raise CheckpointError(f"{path}: expected a list of {classes} strings, or an object from index to label")
        return _counted(tuple(value), classes, str(path))
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: not a UTF-8 text file: {error}") from None
    return _counted(tuple(line.strip() for line in lines if line.strip()), classes, str(path))


def indexed_labels(mapping: dict[str, Any], classes: int, where: str) -> tuple[str, ...]:
    """Labels from an object from index to label, as transformers' `id2label`.

    Raises:
        CheckpointError: an index is missing, unknown or no number, or a label is no string.
    """
    labels: dict[int, str] = {}
    for key, label in mapping.items():
        if not isinstance(label, str) or not key.isascii() or not key.isdigit() or len(key) > 9:
            raise CheckpointError(f"{where}: {key!r}: {label!r}: expected a class index and its label")
        labels[int(key)] = label
    if len(labels) != len(mapping) or sorted(labels) != list(range(classes)):
        raise CheckpointError(f"{where}: {len(labels)} labels, expected one for each of 0...{classes - 1}")
    return tuple(labels[index] for index in range(classes))


def imagenet_labels() -> tuple[str, ...]:
    """The 1,000 descriptions of ILSVRC 2012, in the order of their WordNet ids."""
    text = resources.files("model.checkpoint").joinpath("imagenet_1k.txt").read_text(encoding="utf-8")
    return tuple(text.splitlines())


def _counted(labels: tuple[str, ...], classes: int, where: str) -> tuple[str, ...]:
    if len(labels) != classes:
        raise CheckpointError(f"{where}: {len(labels)} labels for {classes} classes")
    return labels
