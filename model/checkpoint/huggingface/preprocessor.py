"""An image processor's JSON, as transformers' PIL image processors read it (image_processing_backends.py).

What a file leaves open is the attribute of the class that it names, where the attribute says what is
done; only where no file names a class is it that of the model's own family. Numbers (size, mean, std,
filter) must be in the file.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from model.checkpoint.files import Files
from model.checkpoint.huggingface.families import Family
from model.checkpoint.refusals import required, validating
from model.config import PreprocessConfig
from model.errors import CheckpointError

PREPROCESSOR_FILE: Final = "preprocessor_config.json"
PROCESSOR_FILE: Final = "processor_config.json"
"""Of a processor with several parts; transformers 5 writes its image processor nowhere else."""

_RESAMPLING: Final = dict(enumerate(("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")))
"""PIL.Image.Resampling, by the numbers that the files hold."""


class _Attributes(NamedTuple):
    """Defaults of a class for fields that the file leaves out (models/*/image_processing_*.py)."""

    center_crop: bool
    square: bool
    """Whether a `size` that is one number means a square, or the shorter edge (`default_to_square`)."""


_PROCESSORS: Final = {
    "ViT": _Attributes(center_crop=False, square=True),
    "DeiT": _Attributes(center_crop=True, square=True),
    "Bit": _Attributes(center_crop=True, square=False),
    "Beit": _Attributes(center_crop=False, square=True),
    "CLIP": _Attributes(center_crop=True, square=False),
    "Siglip": _Attributes(center_crop=False, square=False),
}
# Files of transformers 4 name classes that transformers 5 no longer has: FeatureExtractor and Fast.
_SUFFIXES: Final = ("ImageProcessor", "ImageProcessorFast", "ImageProcessorPil", "FeatureExtractor")
_CLASSES: Final = {name + suffix: attributes for name, attributes in _PROCESSORS.items() for suffix in _SUFFIXES}


def carried_preprocess(files: Files, family: Family) -> PreprocessConfig | None:
    """Return the preprocessing that a folder carries, or None where no file describes one.

    An image processor within `processor_config.json` is preferred to `preprocessor_config.json`, as
    transformers prefers it (image_processing_base.py).

    Raises:
        CheckpointError: as `read_preprocessor`.
    """
    if files.overlay is not None and (files.overlay.path(PROCESSOR_FILE) or files.overlay.path(PREPROCESSOR_FILE)):
        files = files.overlay
    if files.path(PROCESSOR_FILE) is not None:
        nested = files.json(PROCESSOR_FILE).get("image_processor")
        if isinstance(nested, dict):
            return read_preprocessor(nested, family, files, f"{files.where(PROCESSOR_FILE)}: image_processor")
        if nested is not None:
            raise CheckpointError(f"{files.where(PROCESSOR_FILE)}: image_processor: expected an object")
    if files.path(PREPROCESSOR_FILE) is None:
        return None
    return read_preprocessor(files.json(PREPROCESSOR_FILE), family, files, files.where(PREPROCESSOR_FILE))


def read_preprocessor(json: dict[str, Any], family: Family, files: Files, where: str) -> PreprocessConfig:
    """Return the preprocessing that an image processor's JSON describes; `where` is what messages call it.

    Raises:
        CheckpointError: a processor or step that is not read here, or a number that is missing.
    """
    named = (
        json.get("image_processor_type"),
        json.get("feature_extractor_type"),
        (files.config or {}).get("image_processor_type"),
    )
    kind = next((name for name in named if name is not None), family.image_processor)
    if not isinstance(kind, str) or kind not in _CLASSES:
        raise CheckpointError(f"{where}: image_processor_type {kind!r:.100} is not read by this version")
    attributes = _CLASSES[kind]
    if not _flag(json, "do_resize", True, where):
        raise CheckpointError(f"{where}: do_resize is false: the service needs one input size")
    if not _flag(json, "do_rescale", True, where):
        raise CheckpointError(f"{where}: do_rescale is false: pixels are always scaled to 0...1")
    factor = json.get("rescale_factor", 1 / 255)
    # Not `math.isclose`: JSON's integers may be too large for a float.
    if not _number(factor) or not abs(factor * 255 - 1) <= 1e-6:
        raise CheckpointError(f"{where}: rescale_factor {factor!r:.100}: expected 1/255")
    for step in ("do_pad", "use_square_size"):
        if _flag(json, step, False, where):
            raise CheckpointError(f"{where}: {step} is not read by this version")

    square = _flag(json, "default_to_square", attributes.square, where)
    resize, resize_size = _size(json, "size", square, where)
    size = resize_size
    if _flag(json, "do_center_crop", attributes.center_crop, where):
        crop, size = _size(json, "crop_size", True, where)
        if crop == "shortest_edge":
            raise CheckpointError(f"{where}: crop_size is a shortest_edge: expected a number, or height and width")
    elif resize == "shortest_edge":
        raise CheckpointError(f"{where}: size keeps the aspect and do_center_crop is false: no one input size")
    normalize = _flag(json, "do_normalize", True, where)
    resample = required(json, "resample", where)
    if type(resample) is not int or resample not in _RESAMPLING:
        raise CheckpointError(f"{where}: resample {resample!r:.100}: expected one of {sorted(_RESAMPLING)}")
    fields = {
        "size": size,
        "resize": resize,
        "resize_size": resize_size,
        "interpolation": _RESAMPLING[resample],
        "crop_rounding": "down",
        "mean": required(json, "image_mean", where) if normalize else (0.0, 0.0, 0.0),
        "std": required(json, "image_std", where) if normalize else (1.0, 1.0, 1.0),
    }
    with validating(where):
        return PreprocessConfig.model_validate(fields)


def _size(json: dict[str, Any], key: str, square: bool, where: str) -> tuple[str, tuple[int, int]]:
    """Return how a picture is resized, and to what (rows, columns)."""
    value = required(json, key, where)
    if type(value) is int:
        return ("squash" if square else "shortest_edge"), (value, value)
    if isinstance(value, dict):
        numbers = {key: number for key, number in value.items() if number is not None}
        if all(type(number) is int for number in numbers.values()):
            if numbers.keys() == {"height", "width"}:
                return "squash", (numbers["height"], numbers["width"])
            if numbers.keys() == {"shortest_edge"}:
                return "shortest_edge", (numbers["shortest_edge"], numbers["shortest_edge"])
    raise CheckpointError(f"{where}: {key} {value!r:.100}: expected a number, height and width, or shortest_edge")


def _flag(json: dict[str, Any], key: str, default: bool, where: str) -> bool:
    value = json.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise CheckpointError(f"{where}: {key} {value!r:.100}: expected true or false")
    return value


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
