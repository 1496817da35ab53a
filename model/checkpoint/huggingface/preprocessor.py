"""`preprocessor_config.json`, as transformers' PIL image processors read it (image_processing_backends.py).

ViT's and BEiT's squash to a size; DeiT's squashes and crops; BiT's (DINOv2), CLIP's and SigLIP's keep
the aspect or squash, as their file says. What a file leaves open is the class's attribute, where the
attribute says what is done; numbers (size, mean, std, filter) must be in the file.
"""

from __future__ import annotations

import math
from typing import Any, Final

from pydantic import ValidationError

from model.checkpoint.files import Files, first_problem
from model.checkpoint.huggingface.family import Family
from model.config import Interpolation, PreprocessConfig
from model.errors import CheckpointError

PREPROCESSOR_FILE: Final = "preprocessor_config.json"

_RESAMPLING: Final[dict[int, Interpolation]] = {
    0: "nearest",
    1: "lanczos",
    2: "bilinear",
    3: "bicubic",
    4: "box",
    5: "hamming",
}
"""PIL.Image.Resampling, by the numbers that the files hold."""

_PROCESSORS: Final = ("ViT", "DeiT", "Bit", "Beit", "CLIP", "Siglip")
_SUFFIXES: Final = ("ImageProcessor", "ImageProcessorFast", "ImageProcessorPil", "FeatureExtractor")
_KNOWN: Final = frozenset(prefix + suffix for prefix in _PROCESSORS for suffix in _SUFFIXES)


def read_preprocessor(json: dict[str, Any], family: Family, files: Files) -> PreprocessConfig:
    """Preprocessing from a `preprocessor_config.json`.

    Raises:
        CheckpointError: a processor or step that is not read here, or a number that is missing.
    """
    where = files.where(PREPROCESSOR_FILE)
    kind = json.get("image_processor_type", json.get("feature_extractor_type"))
    if kind is not None and (not isinstance(kind, str) or kind not in _KNOWN):
        raise CheckpointError(f"{where}: image_processor_type {kind!r:.100} is not read by this version")
    if not _flag(json, "do_resize", True, where):
        raise CheckpointError(f"{where}: do_resize is false: the service needs one input size")
    if not _flag(json, "do_rescale", True, where):
        raise CheckpointError(f"{where}: do_rescale is false: pixels are always scaled to 0...1")
    factor = json.get("rescale_factor", 1 / 255)
    if not _number(factor) or not math.isclose(factor, 1 / 255, rel_tol=1e-6):
        raise CheckpointError(f"{where}: rescale_factor {factor!r:.100}: expected 1/255")
    if _flag(json, "do_pad", False, where):
        raise CheckpointError(f"{where}: do_pad is not read by this version")

    resize, resize_size = _size(_required(json, "size", where), family.preprocessor.square, where)
    size = resize_size
    if _flag(json, "do_center_crop", family.preprocessor.center_crop, where):
        _, size = _size(_required(json, "crop_size", where), True, where)
    elif resize == "shortest_edge":
        raise CheckpointError(f"{where}: size keeps the aspect and do_center_crop is false: no one input size")
    normalize = _flag(json, "do_normalize", True, where)
    resample = _required(json, "resample", where)
    if type(resample) is not int or resample not in _RESAMPLING:
        raise CheckpointError(f"{where}: resample {resample!r:.100}: expected one of {sorted(_RESAMPLING)}")
    try:
        return PreprocessConfig.model_validate(
            {
                "size": size,
                "resize": resize,
                "resize_size": resize_size,
                "interpolation": _RESAMPLING[resample],
                "crop_rounding": "down",
                "mean": _statistic(json, "image_mean", where) if normalize else (0.0, 0.0, 0.0),
                "std": _statistic(json, "image_std", where) if normalize else (1.0, 1.0, 1.0),
            }
        )
    except ValidationError as error:
        raise CheckpointError(f"{where}: {first_problem(error)}") from None


def _size(value: Any, square: bool, where: str) -> tuple[str, tuple[int, int]]:
    """How a picture is resized, and to what (rows, columns)."""
    if type(value) is int:
        return ("squash" if square else "shortest_edge"), (value, value)
    if isinstance(value, dict):
        numbers = {key: number for key, number in value.items() if number is not None}
        if all(type(number) is int for number in numbers.values()):
            if numbers.keys() == {"height", "width"}:
                return "squash", (numbers["height"], numbers["width"])
            if numbers.keys() == {"shortest_edge"}:
                return "shortest_edge", (numbers["shortest_edge"], numbers["shortest_edge"])
    raise CheckpointError(f"{where}: size {value!r:.100}: expected a number, height and width, or shortest_edge")


def _statistic(json: dict[str, Any], key: str, where: str) -> Any:
    return _required(json, key, where)


def _flag(json: dict[str, Any], key: str, default: bool, where: str) -> bool:
    value = json.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise CheckpointError(f"{where}: {key} {value!r:.100}: expected true or false")
    return value


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _required(json: dict[str, Any], key: str, where: str) -> Any:
    if json.get(key) is None:
        raise CheckpointError(f"{where}: {key} is missing")
    return json[key]
