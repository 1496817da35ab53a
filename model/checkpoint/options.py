"""The operator's options for a checkpoint: input size, and the preprocessing and labels that some files lack."""

from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter

from model.checkpoint.local_files import read_json, read_text_file, resolved_source, validating
from model.config import PreprocessConfig, Size
from model.errors import CheckpointError

# Published evaluation preprocessing of released models, by name.
#
# Sources: torchvision/models/vision_transformer.py, `ViT_*_Weights`; google-research/vision_transformer,
# vit_jax/input_pipeline.py; facebookresearch/deit, datasets.py, `build_transform`.
PREPROCESS_PRESETS: Final[dict[str, PreprocessConfig]] = TypeAdapter(dict[str, PreprocessConfig]).validate_json(
    resources.files("model.checkpoint").joinpath("preprocess_presets.json").read_bytes()
)

# `imagenet-1k`: the 1,000 classes of ILSVRC 2012 in their usual order; `numbers`: each class's index.
LABEL_PRESETS: Final = ("imagenet-1k", "numbers")


@dataclass(frozen=True)
class CheckpointOptions:
    """Options of the operator that complete or override a checkpoint.

    Attributes:
        image_size: (rows, columns) in pixels to run at instead of the checkpoint's own.
        preprocess: one of `PREPROCESS_PRESETS` or a JSON file, instead of the checkpoint's own; needed for
            formats that carry none.
        labels: one of `LABEL_PRESETS` or a file, likewise.
        activation: `softmax` or `sigmoid`, which makes scores of logits, instead of the checkpoint's own.
        architecture: a timm name, for plain state dicts, e.g. `vit_base_patch16_224`, or `vit` for a network whose
            sizes are its tensors'.
        keys: TOML file that maps names of tensors and says which copy of a network is meant; see `key_map`.
    """

    image_size: Size | None = None
    preprocess: str | None = None
    labels: str | None = None
    activation: str | None = None
    architecture: str | None = None
    keys: str | None = None

    def preprocess_or(
        self,
        default: PreprocessConfig | None,
        where: str,
        missing: str = "carries no preprocessing:",
    ) -> PreprocessConfig:
        """Return the operator's preprocessing, else `default`.

        Args:
            default: what the checkpoint carries.
            where: what messages call the checkpoint.
            missing: what the message says before it advises VIT_PREPROCESS.

        Raises:
            CheckpointError: neither, or a choice that cannot be read.
        """
        if self.preprocess is not None:
            return read_preprocess(self.preprocess)
        if default is None:
            presets = ", ".join(PREPROCESS_PRESETS)
            raise CheckpointError(f"{where}: {missing} set VIT_PREPROCESS to a JSON file or to one of {presets}")
        return default

    def labels_or(self, default: tuple[str, ...] | None, classes: int, where: str) -> tuple[str, ...]:
        """Return the operator's labels, else `default`; none where there are no classes.

        Raises:
            CheckpointError: neither, or a choice that cannot be read or is of another length.
        """
        if not classes:
            return ()
        if self.labels is not None:
            return read_labels(self.labels, classes)
        if default is None:
            raise CheckpointError(
                f"{where}: no labels for its {classes} classes: set VIT_LABELS to a file "
                f"or to one of {', '.join(LABEL_PRESETS)}"
            )
        return default


def read_preprocess(name: str) -> PreprocessConfig:
    """Return a preset by name, or what JSON or a file of it says with the fields of `model.config.PreprocessConfig`.

    Raises:
        CheckpointError: neither a preset nor a file, or fields that are missing, unknown or wrong.
    """
    if name in PREPROCESS_PRESETS:
        return PREPROCESS_PRESETS[name]
    if name.startswith("{"):
        with validating("VIT_PREPROCESS"):
            return PreprocessConfig.model_validate_json(name)
    path = Path(name).expanduser()
    if resolved_source(path, str(path)) is None:
        raise CheckpointError(f"VIT_PREPROCESS {name!r}: neither a file nor one of {', '.join(PREPROCESS_PRESETS)}")
    with validating(str(path)):
        return PreprocessConfig.model_validate(read_json(path, str(path)))


def read_labels(name: str, classes: int | None) -> tuple[str, ...]:
    """Return labels from a preset, a JSON file (a list, or an object from index to label), or a text file, one a line.

    Raises:
        CheckpointError: neither a preset nor a file, or not exactly `classes` labels, if that is a number.
    """
    if name == "numbers" and classes is not None:
        return tuple(str(index) for index in range(classes))
    path = Path(name).expanduser()
    if name == "imagenet-1k":
        labels = imagenet_labels()
    elif resolved_source(path, str(path)) is None:
        raise CheckpointError(f"VIT_LABELS {name!r}: neither a file nor one of {', '.join(LABEL_PRESETS)}")
    elif path.suffix.lower() == ".json":
        value = read_json(path, str(path))
        if isinstance(value, dict):
            return indexed_labels(value, len(value) if classes is None else classes, str(path))
        if not isinstance(value, list) or not all(isinstance(label, str) for label in value):
            raise CheckpointError(f"{path}: expected a list of strings, or an object from index to label")
        labels = tuple(value)
    else:
        lines = read_text_file(path, str(path)).splitlines()
        labels = tuple(line.strip() for line in lines if line.strip())
    if not labels or classes not in (None, len(labels)):
        raise CheckpointError(f"{path}: {len(labels)} labels for {classes or 'any'} classes")
    return labels


def indexed_labels(mapping: dict[str, Any], classes: int, where: str) -> tuple[str, ...]:
    """Return the labels of an object from index to label, as transformers' `id2label`.

    Raises:
        CheckpointError: an index is missing, unknown or no number, or a label is no string.
    """
    expected = [str(index) for index in range(classes)]
    for key, label in mapping.items():
        if not isinstance(label, str):
            raise CheckpointError(f"{where}: {key!r:.100}: {label!r:.100}: a label must be text, in quotes")
        if not key.isascii() or not key.isdigit():
            raise CheckpointError(f"{where}: {key!r:.100}: {label!r:.100}: expected a class index and its label")
    if mapping.keys() != set(expected):
        raise CheckpointError(f"{where}: {len(mapping)} labels, expected one for each of 0...{classes - 1}")
    return tuple(mapping[index] for index in expected)


def imagenet_labels() -> tuple[str, ...]:
    """Return the 1,000 descriptions of ILSVRC 2012, in the order of their WordNet ids."""
    text = resources.files("model.checkpoint").joinpath("imagenet_1k.txt").read_text(encoding="utf-8")
    return tuple(text.splitlines())
