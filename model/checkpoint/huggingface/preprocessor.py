"""An image processor's JSON, as transformers' PIL image processors read it.

Source: image_processing_backends.py. If the file leaves a field out, its value is the attribute of
the class that the file names, or else of the class of the model's family. Sizes, filter and
statistics that come from a class are listed as assumed.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from model.checkpoint.files import Files
from model.checkpoint.huggingface.family import Family
from model.checkpoint.known_fields import unknown_fields
from model.checkpoint.local_files import advising, validating
from model.checkpoint.options import SET_PREPROCESS
from model.config import PreprocessConfig
from model.errors import CheckpointError

PREPROCESSOR_FILE: Final = "preprocessor_config.json"
# A processor with several parts. transformers 5 writes its image processor only here.
PROCESSOR_FILE: Final = "processor_config.json"

# PIL.Image.Resampling, by the numbers that the files hold.
_RESAMPLING: Final = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")

_SQUARE: Final = {"height": 224, "width": 224}
_HALF: Final = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
_OPENAI: Final = {
    "do_center_crop": True,
    "default_to_square": False,
    "size": {"shortest_edge": 224},
    "crop_size": _SQUARE,
    "resample": 3,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
# Attributes of each class for fields that the file leaves out (models/*/image_processing_*.py).
_PROCESSORS: Final[dict[str, dict[str, Any]]] = {
    "ViT": _HALF | {"size": _SQUARE, "resample": 2},
    "DeiT": _HALF
    | {
        "do_center_crop": True,
        "size": {"height": 256, "width": 256},
        "crop_size": _SQUARE,
        "resample": 3,
    },
    "Bit": _OPENAI,
    "Beit": _HALF | {"size": _SQUARE, "crop_size": _SQUARE, "resample": 3},
    "CLIP": _OPENAI,
    "Siglip": _HALF | {"default_to_square": False, "size": _SQUARE, "resample": 3},
}
# Files of transformers 4 name classes that transformers 5 does not have: FeatureExtractor and Fast.
_SUFFIXES: Final = ("ImageProcessor", "ImageProcessorFast", "ImageProcessorPil", "FeatureExtractor")
_CLASSES: Final = {
    name + suffix: attributes for name, attributes in _PROCESSORS.items() for suffix in _SUFFIXES
}

Statistic = float | list[float]
Resized = tuple[Literal["squash", "shortest_edge"], tuple[int, int]]
# Names of steps that change pixels, and that the classes above do not have.
_STEP: Final = re.compile("do_|rescale_offset|offset")
# A factor within this share of 1/255 is 1/255.
_TOLERANCE: Final = 1e-6


def _filter_number(value: object) -> object:
    """Return the number of a filter that is stated by its name, such as `bicubic`."""
    name = str(value).rpartition(".")[2].lower()
    return _RESAMPLING.index(name) if name in _RESAMPLING else value


class _Processor(BaseModel):
    """The fields of an image processor's JSON that change pixels; unsupported steps must be off."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    do_resize: Literal[True] | None = None
    do_rescale: bool = True
    do_normalize: bool = True
    do_center_crop: bool = False
    do_pad: Literal[False] | None = None
    use_square_size: Literal[False] | None = None
    # Whether a `size` of one number is a square instead of the shorter edge.
    default_to_square: bool = True
    rescale_factor: Annotated[float, Field(gt=0, le=1e3)] = 1 / 255
    size: Any
    crop_size: Any = None
    resample: Annotated[int, Field(ge=0, le=5), BeforeValidator(_filter_number)]
    image_mean: Statistic | None = None
    image_std: Statistic | None = None


class Carried(NamedTuple):
    """The preprocessing of a folder, and notes on fields that no file states."""

    preprocess: PreprocessConfig
    assumed: tuple[str, ...]


def carried_preprocess(files: Files, family: Family) -> Carried | None:
    """Return the preprocessing that a folder carries, or None if no file describes one.

    An image processor within `processor_config.json` wins over `preprocessor_config.json`, as in
    transformers (image_processing_base.py).

    Raises:
        CheckpointError: a processor, a step or a number that is not supported.
    """
    overlay = files.overlay
    if overlay and (overlay.path(PROCESSOR_FILE) or overlay.path(PREPROCESSOR_FILE)):
        files = overlay
    if files.path(PROCESSOR_FILE) is not None:
        nested = files.json(PROCESSOR_FILE).get("image_processor")
        if isinstance(nested, dict):
            where = f"{files.where(PROCESSOR_FILE)}: image_processor"
            return _compared(_read(nested, family, files, where), family, files)
    if files.path(PREPROCESSOR_FILE) is None:
        return None
    return _read(files.json(PREPROCESSOR_FILE), family, files, files.where(PREPROCESSOR_FILE))


def _compared(carried: Carried, family: Family, files: Files) -> Carried:
    """Return the preprocessing, with a note if `preprocessor_config.json` has another."""
    if files.path(PREPROCESSOR_FILE) is None:
        return carried
    try:
        other = _read(files.json(PREPROCESSOR_FILE), family, files, files.where(PREPROCESSOR_FILE))
    except CheckpointError:
        other = None
    if other is not None and other.preprocess == carried.preprocess:
        return carried
    note = (
        f"preprocessing: that of {PROCESSOR_FILE}, as transformers takes it; {PREPROCESSOR_FILE} "
        "has another (VIT_PREPROCESS)"
    )
    return Carried(carried.preprocess, (*carried.assumed, note))


@advising(SET_PREPROCESS)
def _read(json: dict[str, Any], family: Family, files: Files, where: str) -> Carried:
    """Return the preprocessing that an image processor's JSON describes.

    Args:
        json: content of the JSON.
        family: class of the model.
        files: files of the checkpoint.
        where: name of the JSON in messages.

    Raises:
        CheckpointError: a processor, a step or a number that is not supported; it names the
            setting that replaces the preprocessing.
    """
    kind = _class_name(json, family, files)
    if not isinstance(kind, str) or kind not in _CLASSES:
        raise CheckpointError(
            f"{where}: image_processor_type {kind!r:.100} is not read by this version"
        )
    unknown = unknown_fields(json, "processor")
    step = next(filter(_STEP.match, unknown), None)
    if step is not None:
        raise CheckpointError(
            f"{where}: {step} is not a step of {kind}: leave the field out if training did not do "
            "it either"
        )
    processor = _processor(json, kind, where)
    resize, resize_size, size = _sizes(processor, where)
    mean, std = _statistics(processor, _channels(files))
    fields = {
        "size": size,
        "resize": resize,
        "resize_size": resize_size,
        "interpolation": _RESAMPLING[processor.resample],
        "crop_rounding": "down",
        "mean": mean,
        "std": std,
    }
    used = {"size", "resample"}
    if processor.do_center_crop:
        used.add("crop_size")
    if processor.do_normalize:
        used |= {"image_mean", "image_std"}
    with validating(where, "image_"):
        preprocess = PreprocessConfig.model_validate(fields)
    assumed: tuple[str, ...] = ()
    names = [name for name in _CLASSES[kind] if name in used - json.keys()]
    if names:
        assumed = (
            f"preprocessing: {', '.join(names)} of {kind}, because {where} does not state it "
            "(VIT_PREPROCESS)",
        )
    if unknown:
        assumed += (f"preprocessing: without {', '.join(unknown)}, which {kind} does not have",)
    return Carried(preprocess, assumed)


def _processor(json: dict[str, Any], kind: str, where: str) -> _Processor:
    """Return the fields of a processor's JSON, with the attributes of its class for others."""
    # A step whose flag is null is left out, as in transformers.
    stated = {
        name: False if value is None and name.startswith("do_") else value
        for name, value in json.items()
    }
    with validating(where):
        processor = _Processor.model_validate(_CLASSES[kind] | stated)
    if processor.do_normalize and None in (processor.image_mean, processor.image_std):
        raise CheckpointError(f"{where}: image_mean or image_std is null: state both")
    return processor


def _sizes(processor: _Processor, where: str) -> tuple[str, tuple[int, int], tuple[int, int]]:
    """Return how a picture is resized, its new (rows, columns), and the input's (rows, columns).

    Raises:
        CheckpointError: they do not tell one input size, or a picture would be padded.
    """
    resize, resize_size = _sized(processor.size, processor.default_to_square, f"{where}: size")
    if not processor.do_center_crop:
        if resize == "shortest_edge":
            raise CheckpointError(
                f"{where}: size keeps the aspect and do_center_crop is false: no one input size"
            )
        return resize, resize_size, resize_size
    crop, size = _sized(processor.crop_size, True, f"{where}: crop_size")
    if crop == "shortest_edge":
        raise CheckpointError(
            f"{where}: crop_size is a shortest_edge: expected a number, or height and width"
        )
    if size[0] > resize_size[0] or size[1] > resize_size[1]:
        raise CheckpointError(
            f"{where}: crop_size {size} is larger than size {resize_size}: pictures are not padded"
        )
    return resize, resize_size, size


def _class_name(json: dict[str, Any], family: Family, files: Files) -> Any:
    """Return the class that the JSON or the config names, else the family's."""
    stated = (
        json.get("image_processor_type"),
        json.get("feature_extractor_type"),
        files.config.get("image_processor_type"),
    )
    return next((name for name in stated if name is not None), family.image_processor)


def _channels(files: Files) -> int:
    channels = files.config.get("num_channels", 3)
    return channels if channels in (1, 3) else 3


def _statistics(processor: _Processor, channels: int) -> tuple[list[float], list[float]]:
    """Return the mean and deviation of pixels of 0...1 that give the processor's values.

    A processor with another factor than 1/255, or without one, gives the same values as one with
    1/255 and other statistics.
    """
    mean = [0.0] * channels
    std = [1.0] * channels
    if processor.do_normalize:
        mean = _of_channels(processor.image_mean, channels)
        std = _of_channels(processor.image_std, channels)
    factor = 255 * (processor.rescale_factor if processor.do_rescale else 1.0)
    if abs(factor - 1) <= _TOLERANCE:
        return mean, std
    return [value / factor for value in mean], [value / factor for value in std]


def _of_channels(value: Statistic | None, channels: int) -> list[float]:
    """Return a statistic for each channel; a single number is for all channels."""
    return value if isinstance(value, list) else [value or 0.0] * channels


def _sized(value: Any, square: bool, where: str) -> Resized:
    """Return how a picture is resized, and its new (rows, columns)."""
    sides: Mapping[str, Any] = {}
    kind: Literal["squash", "shortest_edge"] = "squash"
    if isinstance(value, dict):
        sides = {name: edge for name, edge in value.items() if edge is not None}
    elif isinstance(value, list) and len(value) == 2:
        sides = dict(zip(("height", "width"), value, strict=True))
    elif square:
        sides = {"height": value, "width": value}
    else:
        sides = {"shortest_edge": value}
    if sides.keys() == {"shortest_edge"}:
        kind = "shortest_edge"
        edges = (sides["shortest_edge"], sides["shortest_edge"])
    elif sides.keys() == {"height", "width"}:
        edges = (sides["height"], sides["width"])
    else:
        edges = (None, None)
    if not all(type(edge) is int and edge > 0 for edge in edges):
        raise CheckpointError(
            f"{where} {value!r:.100}: expected a number, height and width, or shortest_edge"
        )
    return kind, edges
