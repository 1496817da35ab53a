"""An image processor's JSON, as transformers' PIL image processors read it (image_processing_backends.py).

What a file leaves open is the attribute of the class that it names, where the attribute says what is
done; only where no file names a class is it that of the model's own family. Numbers (size, mean, std,
filter) must be in the file.
"""

from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from model.checkpoint.files import Files
from model.checkpoint.huggingface.families import Family
from model.checkpoint.local_files import validating
from model.config import PreprocessConfig
from model.errors import CheckpointError

PREPROCESSOR_FILE: Final = "preprocessor_config.json"
# Of a processor with several parts; transformers 5 writes its image processor nowhere else.
PROCESSOR_FILE: Final = "processor_config.json"

# PIL.Image.Resampling, by the numbers that the files hold.
_RESAMPLING: Final = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")


# Defaults of a class for fields that the file leaves out (models/*/image_processing_*.py): whether a centre is cut out,
# and whether a `size` that is one number means a square, or the shorter edge (`default_to_square`).
_PROCESSORS: Final = {
    "ViT": (False, True),
    "DeiT": (True, True),
    "Bit": (True, False),
    "Beit": (False, True),
    "CLIP": (True, False),
    "Siglip": (False, False),
}
# Files of transformers 4 name classes that transformers 5 no longer has: FeatureExtractor and Fast.
_SUFFIXES: Final = ("ImageProcessor", "ImageProcessorFast", "ImageProcessorPil", "FeatureExtractor")
_CLASSES: Final = {name + suffix: attributes for name, attributes in _PROCESSORS.items() for suffix in _SUFFIXES}

Edge = Annotated[int, Field(ge=1)]
Resized = tuple[Literal["squash", "shortest_edge"], tuple[int, int]]


class _Sides(BaseModel):
    """A size as an object: both sides, or the shorter one."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    height: Edge | None = None
    width: Edge | None = None
    shortest_edge: Edge | None = None
    longest_edge: None = None


class _Processor(BaseModel):
    """The fields of an image processor's JSON that change pixels; steps that are not read must be off."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    do_resize: Literal[True] | None = None
    do_rescale: Literal[True] | None = None
    do_normalize: bool | None = None
    do_center_crop: bool | None = None
    do_pad: Literal[False] | None = None
    use_square_size: Literal[False] | None = None
    default_to_square: bool | None = None
    rescale_factor: Annotated[float, Field(ge=0.999999 / 255, le=1.000001 / 255)] = 1 / 255
    size: Edge | _Sides
    crop_size: Edge | _Sides | None = None
    resample: Annotated[int, Field(ge=0, le=5)]
    image_mean: list[float] | None = None
    image_std: list[float] | None = None


def carried_preprocess(files: Files, family: Family) -> PreprocessConfig | None:
    """Return the preprocessing that a folder carries, or None where no file describes one.

    An image processor within `processor_config.json` is preferred to `preprocessor_config.json`, as
    transformers prefers it (image_processing_base.py).

    Raises:
        CheckpointError: a processor or step that is not read here, or a number that is missing.
    """
    if files.overlay is not None and (files.overlay.path(PROCESSOR_FILE) or files.overlay.path(PREPROCESSOR_FILE)):
        files = files.overlay
    if files.path(PROCESSOR_FILE) is not None:
        nested = files.json(PROCESSOR_FILE).get("image_processor")
        if isinstance(nested, dict):
            return read_preprocessor(nested, family, files, f"{files.where(PROCESSOR_FILE)}: image_processor")
    if files.path(PREPROCESSOR_FILE) is None:
        return None
    return read_preprocessor(files.json(PREPROCESSOR_FILE), family, files, files.where(PREPROCESSOR_FILE))


def read_preprocessor(json: dict[str, Any], family: Family, files: Files, where: str) -> PreprocessConfig:
    """Return the preprocessing that an image processor's JSON describes; `where` is what messages call it.

    Raises:
        CheckpointError: a processor or step that is not read here, or a number that is missing.
    """
    named = [json.get(key) for key in ("image_processor_type", "feature_extractor_type")]
    named += [files.config.get("image_processor_type"), family.image_processor]
    kind = next(name for name in named if name is not None)
    if not isinstance(kind, str) or kind not in _CLASSES:
        raise CheckpointError(f"{where}: image_processor_type {kind!r:.100} is not read by this version")
    center_crop, square = _CLASSES[kind]
    with validating(where):
        processor = _Processor.model_validate(json)
    is_square = square if processor.default_to_square is None else processor.default_to_square
    resize, resize_size = _sized(processor.size, is_square, f"{where}: size")
    size = resize_size
    if center_crop if processor.do_center_crop is None else processor.do_center_crop:
        crop, size = _sized(processor.crop_size, True, f"{where}: crop_size")
        if crop == "shortest_edge":
            raise CheckpointError(f"{where}: crop_size is a shortest_edge: expected a number, or height and width")
    elif resize == "shortest_edge":
        raise CheckpointError(f"{where}: size keeps the aspect and do_center_crop is false: no one input size")
    is_raw = processor.do_normalize is False
    fields = {
        "size": size,
        "resize": resize,
        "resize_size": resize_size,
        "interpolation": _RESAMPLING[processor.resample],
        "crop_rounding": "down",
        "mean": (0.0, 0.0, 0.0) if is_raw else processor.image_mean,
        "std": (1.0, 1.0, 1.0) if is_raw else processor.image_std,
    }
    with validating(where, "image_"):
        return PreprocessConfig.model_validate(fields)


def _sized(value: int | _Sides | None, square: bool, where: str) -> Resized:
    """Return how a picture is resized, and to what (rows, columns)."""
    if isinstance(value, int):
        return ("squash" if square else "shortest_edge"), (value, value)
    sides = value or _Sides()
    if sides.height and sides.width and sides.shortest_edge is None:
        return "squash", (sides.height, sides.width)
    if sides.shortest_edge and sides.height is None and sides.width is None:
        return "shortest_edge", (sides.shortest_edge, sides.shortest_edge)
    raise CheckpointError(f"{where}: expected a number, height and width, or shortest_edge")
