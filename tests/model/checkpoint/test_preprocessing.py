"""Pixels equal those of transformers' image processors and timm's evaluation transforms."""

import io
import itertools
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageOps

from model.checkpoint import load_checkpoint, native
from model.checkpoint.files import Files
from model.checkpoint.huggingface import FAMILIES
from model.checkpoint.huggingface.family import Family
from model.checkpoint.huggingface.preprocessor import carried_preprocess
from model.checkpoint.input_size import resized_preprocess
from model.checkpoint.timm import Pretrained
from model.config import PreprocessConfig
from model.errors import CheckpointError
from model.images.preprocess import preprocess
from tests.model.checkpoint.folders import huggingface_folder, put, refusal, timm_folder
from tests.model.checkpoint.parity import preprocess_file
from tests.model.images.pictures import encode
from tests.timm_reference import timm, transformers

pytestmark = pytest.mark.timeout(60)  # imports the libraries of the references

BY_CLASS = {family.class_name: family for family in FAMILIES}

OF_PROCESSORS = sorted({family.image_processor: name for name, family in BY_CLASS.items()}.values())
"""One family for each image processor."""

PROCESSORS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "vit": ("ViTImageProcessorPil", "ViTForImageClassification", {}),
    "vit-bicubic-384": (
        "ViTImageProcessorPil",
        "ViTForImageClassification",
        {"size": {"height": 384, "width": 384}, "resample": 3},
    ),
    "vit-not-square": (
        "ViTImageProcessorPil",
        "ViTForImageClassification",
        {"size": {"height": 160, "width": 240}},
    ),
    "deit": ("DeiTImageProcessorPil", "DeiTForImageClassification", {}),
    "dinov2": (
        "BitImageProcessorPil",
        "Dinov2ForImageClassification",
        {"size": {"shortest_edge": 256}},
    ),
    "dinov2-odd": (
        "BitImageProcessorPil",
        "Dinov2ForImageClassification",
        {"size": {"shortest_edge": 257}},
    ),
    "beit": ("BeitImageProcessorPil", "BeitForImageClassification", {}),
    "clip": ("CLIPImageProcessorPil", "CLIPForImageClassification", {}),
    "siglip": ("SiglipImageProcessorPil", "SiglipForImageClassification", {}),
}

CROPS: dict[str, dict[str, Any]] = {
    "center-bicubic": {"crop_pct": 0.9, "crop_mode": "center", "interpolation": "bicubic"},
    "center-bilinear": {"crop_pct": 0.875, "crop_mode": "center", "interpolation": "bilinear"},
    "center-whole": {"crop_pct": 1.0, "crop_mode": "center", "interpolation": "bicubic"},
    "squash-bicubic": {"crop_pct": 1.0, "crop_mode": "squash", "interpolation": "bicubic"},
    "squash-bilinear": {"crop_pct": 0.95, "crop_mode": "squash", "interpolation": "bilinear"},
    "center-not-square": {
        "crop_pct": 0.9,
        "crop_mode": "center",
        "interpolation": "bicubic",
        "input_size": [3, 160, 256],
    },
}

CLASSES = ("ViT", "DeiT", "Bit", "Beit", "CLIP", "Siglip")

STATISTICS: dict[str, dict[str, Any]] = {
    "pixels to 255": {
        "do_rescale": False,
        "image_mean": [123.0, 117.0, 104.0],
        "image_std": [58.0] * 3,
    },
    "pixels to 255, small deviation": {"do_rescale": False, "image_std": [0.2] * 3},
    "pixels to 2": {"rescale_factor": 1 / 127.5, "image_mean": [1.0] * 3, "image_std": [1.0] * 3},
    "not normalised": {"do_normalize": False, "rescale_factor": 1 / 127.5},
    "the plain pixels": {"do_normalize": False, "do_rescale": False},
    "null steps": {"do_normalize": None, "do_rescale": None, "do_center_crop": None},
}

SIZES: dict[str, Any] = {
    "number": 96,
    "height-width": {"height": 90, "width": 120},
    "shortest-edge": {"shortest_edge": 96},
    "list": [90, 120],
}

NUMBERS = {
    "crop_size": 80,
    "resample": 3,
    "image_mean": [0.1, 0.2, 0.3],
    "image_std": [0.4, 0.5, 0.6],
}
"""Other required fields of a file, without preprocessing."""


@cache
def generated() -> list[bytes]:
    """Return small noisy pictures of odd sizes, so that margins are odd and every pixel matters."""
    numbers = np.random.default_rng(0)
    found = []
    for width, height in ((301, 200), (200, 301), (97, 640), (255, 257), (64, 64), (500, 333)):
        low = numbers.integers(0, 256, (height // 4 + 1, width // 4 + 1, 3), dtype=np.uint8)
        found.append(
            encode(Image.fromarray(low).resize((width, height), Image.Resampling.BICUBIC), "PNG")
        )
    return found


@pytest.fixture(scope="module")
def photographs(shared: Path) -> list[tuple[bytes, Image.Image]]:
    """Return some files of usual size, last a large one, each with its picture."""
    paths = sorted((shared / "data" / "imagenet-samples").glob("*.JPEG"))[::10]
    paths += sorted((shared / "data" / "photos").glob("*.jpg"))[:1]
    assert len(paths) > 5
    files = [path.read_bytes() for path in paths]
    return [(data, upright(data)) for data in files]


def upright(data: bytes) -> Image.Image:
    return ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")


def huggingface_case(case: str, folder: Path) -> tuple[PreprocessConfig, Any]:
    name, family, options = PROCESSORS[case]
    processor = getattr(transformers(), name)(**options)
    processor.save_pretrained(folder)
    carried = carried_preprocess(Files(folder, str(folder)), BY_CLASS[family])
    assert carried is not None
    return carried.preprocess, resized_by(processor)


def resized_by(processor: Any) -> Any:
    """Return a transformers image processor's pixels 0...255 of a picture, before normalisation."""

    def reference(image: Image.Image) -> NDArray[np.float64]:
        pixels = processor(image, do_rescale=False, do_normalize=False, return_tensors="np")[
            "pixel_values"
        ][0]
        return np.asarray(pixels, dtype=np.float64).transpose(1, 2, 0)

    return reference


def timm_case(case: str) -> tuple[PreprocessConfig, Any]:
    library = timm()
    fields = {
        "input_size": [3, 224, 224],
        "mean": [0.485, 0.456, 0.406],
        "std": [0.229, 0.224, 0.225],
    } | CROPS[case]
    config = Pretrained.model_validate(fields).preprocess()
    transform = library.data.create_transform(**fields, is_training=False, normalize=False)

    def reference(image: Image.Image) -> NDArray[np.float64]:
        return np.asarray(transform(image), dtype=np.float64).transpose(1, 2, 0)

    return config, reference


def largest_difference(
    config: PreprocessConfig, reference: Any, data: bytes, picture: Image.Image | None = None
) -> float:
    got = preprocess(data, config, scaled_decode=False).astype(np.float64)
    expected = reference(picture or upright(data))
    assert got.shape == expected.shape
    return float(np.abs(got - expected).max())


@pytest.mark.parametrize("case", PROCESSORS)
def test_pixels_equal_transformers(case: str, tmp_path: Path) -> None:
    config, reference = huggingface_case(case, tmp_path)
    assert max(largest_difference(config, reference, data) for data in generated()) <= 1


def assert_read_as_by_transformers(
    file: dict[str, Any], family: Family, folder: Path, **config: Any
) -> None:
    """Check the pixels against the processor that transformers chooses for this family and file.

    If its pictures have different sizes, the file is refused.
    """
    # transformers lacks a processor for DINOv2 with registers; the released models name DINOv2's.
    model_type = family.model_type.removesuffix("_with_registers")
    (folder / "config.json").write_text(json.dumps({"model_type": model_type} | config))
    (folder / "preprocessor_config.json").write_text(json.dumps(file))
    assert_carried_as_by_transformers(family, folder)


def assert_carried_as_by_transformers(family: Family, folder: Path) -> None:
    """Check the files of a folder against the processor that transformers chooses."""
    processor = transformers().AutoImageProcessor.from_pretrained(folder, backend="pil")
    reference = resized_by(processor)
    wide, tall = generated()[:2]
    if reference(upright(wide)).shape != reference(upright(tall)).shape:
        with pytest.raises(CheckpointError, match="no one input size"):
            carried_preprocess(Files(folder, str(folder)), family)
        return
    carried = carried_preprocess(Files(folder, str(folder)), family)
    assert carried is not None
    read = carried.preprocess
    assert max(largest_difference(read, reference, data) for data in (wide, tall)) <= 1
    assert (read.mean, read.std) == (processor.image_mean, processor.image_std)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("family", OF_PROCESSORS)
def test_the_family_gives_missing_fields(family: str, size: str, tmp_path: Path) -> None:
    assert_read_as_by_transformers(NUMBERS | {"size": SIZES[size]}, BY_CLASS[family], tmp_path)


@pytest.mark.parametrize("family", sorted(BY_CLASS.keys() - OF_PROCESSORS))
def test_families_share_an_image_processor(family: str, tmp_path: Path) -> None:
    assert_read_as_by_transformers(NUMBERS | {"size": 96}, BY_CLASS[family], tmp_path)


@pytest.mark.parametrize("shift", range(len(CLASSES)))
@pytest.mark.parametrize("number", range(len(CLASSES)), ids=CLASSES)
def test_named_class_gives_missing_fields(number: int, shift: int, tmp_path: Path) -> None:
    # Every class meets every family and every size.
    family = OF_PROCESSORS[(number + shift) % len(OF_PROCESSORS)]
    size = list(SIZES.values())[shift % len(SIZES)]
    named = {"feature_extractor_type": f"{CLASSES[number]}FeatureExtractor"}
    assert_read_as_by_transformers(NUMBERS | {"size": size} | named, BY_CLASS[family], tmp_path)


@pytest.mark.parametrize(
    "missing", ["size", "crop_size", "resample", "image_mean", "image_std", "all"]
)
@pytest.mark.parametrize("name", CLASSES)
def test_the_class_gives_a_missing_number(name: str, missing: str, tmp_path: Path) -> None:
    file = (
        {}
        if missing == "all"
        else {k: v for k, v in (NUMBERS | {"size": 256}).items() if k != missing}
    )
    family = BY_CLASS["ViTForImageClassification"]
    assert_read_as_by_transformers(
        file | {"image_processor_type": f"{name}ImageProcessor"}, family, tmp_path
    )


def test_a_missing_number_is_called_assumed(tmp_path: Path) -> None:
    put(huggingface_folder(tmp_path) / "preprocessor_config.json", "resample")
    (assumed,) = load_checkpoint(str(tmp_path)).assumed
    assert "resample of ViTImageProcessor" in assumed


NESTED: dict[str, dict[str, Any]] = {
    "nested alone": {"processor_config.json": {"image_processor": NUMBERS | {"size": 96}}},
    "nested beside the other file": {
        "processor_config.json": {
            "processor_class": "CLIPProcessor",
            "image_processor": NUMBERS | {"size": 96},
        },
        "preprocessor_config.json": NUMBERS
        | {"size": 90, "crop_size": 70, "image_mean": [0.5, 0.5, 0.5]},
    },
    "nothing nested": {
        "processor_config.json": {"processor_class": "CLIPProcessor"},
        "preprocessor_config.json": NUMBERS | {"size": 96},
    },
    "null nested": {
        "processor_config.json": {"image_processor": None},
        "preprocessor_config.json": NUMBERS | {"size": 96},
    },
}


@pytest.mark.parametrize("case", NESTED)
def test_nested_image_processor_is_preferred(case: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "clip"}))
    for name, content in NESTED[case].items():
        (tmp_path / name).write_text(json.dumps(content))
    assert_carried_as_by_transformers(BY_CLASS["CLIPForImageClassification"], tmp_path)


@pytest.mark.parametrize("case", CROPS)
def test_pixels_equal_timms_transforms(case: str) -> None:
    config, reference = timm_case(case)
    assert max(largest_difference(config, reference, data) for data in generated()) <= 1


@pytest.mark.parametrize("crop_mode", ["center", "squash"])
def test_every_share_is_rounded_as_by_timm(crop_mode: str) -> None:
    fields: dict[str, Any] = {
        "mean": [0.5] * 3,
        "std": [0.5] * 3,
        "interpolation": "bicubic",
        "crop_mode": crop_mode,
    }
    for percent, size in itertools.product(
        range(800, 1001, 5), ((224, 224), (384, 384), (448, 336), (97, 518))
    ):
        stated = fields | {"crop_pct": percent / 1000, "input_size": [3, 224, 224]}
        transform = timm().data.create_transform(
            **stated | {"input_size": [3, *size]}, is_training=False
        )
        expected = transform.transforms[0].size
        expected = (expected, expected) if isinstance(expected, int) else tuple(expected)
        assert (
            resized_preprocess(Pretrained.model_validate(stated).preprocess(), size).resize_size
            == expected
        )


def test_a_converted_folder_keeps_its_share(tmp_path: Path) -> None:
    checkpoint = load_checkpoint(str(timm_folder(tmp_path / "timm")))
    native.write(tmp_path / "native", checkpoint)
    resized = load_checkpoint(str(tmp_path / "native"), image_size=(40, 40))
    assert (
        resized.preprocess
        == load_checkpoint(str(tmp_path / "timm"), image_size=(40, 40)).preprocess
    )
    assert resized.preprocess.resize_size == (44, 44)


def test_an_operators_share_gives_a_size(tmp_path: Path) -> None:
    folder = str(timm_folder(tmp_path))
    fields = {
        "size": [16, 16],
        "resize": "shortest_edge",
        "interpolation": "bicubic",
        "mean": [0],
        "std": [1],
    }
    told = {"mean": [0.5] * 3, "std": [0.5] * 3, "crop_pct": 0.9}
    assert load_checkpoint(folder, preprocess=json.dumps(fields | told)).preprocess.resize_size == (
        17,
        17,
    )
    with pytest.raises(CheckpointError, match=r"is not floor\(size / crop_pct\), \(17, 17\)"):
        load_checkpoint(folder, preprocess=json.dumps(fields | told | {"resize_size": [18, 18]}))
    with pytest.raises(CheckpointError, match="crop_pct"):
        load_checkpoint(folder, preprocess=json.dumps(fields | told | {"crop_pct": 90}))


def test_timms_border_crop_is_refused(tmp_path: Path) -> None:
    put(timm_folder(tmp_path) / "config.json", "pretrained_cfg.crop_mode", "border")
    assert "set VIT_PREPROCESS" in refusal(tmp_path)
    assert load_checkpoint(str(tmp_path), preprocess=preprocess_file(tmp_path, 16, 16)).labels


@pytest.mark.shared
@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("case", [*PROCESSORS, *CROPS])
def test_pixels_on_real_pictures(
    case: str, photographs: list[tuple[bytes, Image.Image]], tmp_path: Path
) -> None:
    config, reference = huggingface_case(case, tmp_path) if case in PROCESSORS else timm_case(case)
    chosen = photographs if case in ("vit", "center-bicubic") else photographs[:-1]
    worst = max(largest_difference(config, reference, *photograph) for photograph in chosen)
    print(f"preprocessing {case}: {worst:.0f} of 255 on {len(chosen)} pictures")  # noqa: T201
    assert worst <= 1


@pytest.mark.parametrize("case", STATISTICS)
def test_statistics_equal_transformers(case: str, tmp_path: Path) -> None:
    folder = huggingface_folder(tmp_path)
    for key, value in STATISTICS[case].items():
        put(folder / "preprocessor_config.json", key, value)
    config = load_checkpoint(str(folder)).preprocess
    picture = generated()[0]
    pixels = preprocess(picture, config) / 255
    values = (pixels - np.array(config.mean)) / np.array(config.std)
    processor = transformers().ViTImageProcessorPil.from_pretrained(folder)
    expected = processor(upright(picture), return_tensors="np")["pixel_values"][0]
    np.testing.assert_allclose(values.transpose(2, 0, 1), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["bicubic", "BICUBIC", "PILImageResampling.BICUBIC"])
def test_a_filter_may_be_stated_by_name(name: str, tmp_path: Path) -> None:
    folder = huggingface_folder(tmp_path)
    put(folder / "preprocessor_config.json", "resample", name)
    assert load_checkpoint(str(folder)).preprocess.interpolation == "bicubic"
