"""The pixels of transformers' image processors and of timm's evaluation transforms, on real pictures."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageOps
from timm_reference import timm, transformers

from model.checkpoint.files import Folder
from model.checkpoint.huggingface import FAMILIES
from model.checkpoint.huggingface.preprocessor import read_preprocessor
from model.checkpoint.timm import _preprocess
from model.config import PreprocessConfig
from model.preprocess import preprocess

BY_CLASS = {family.class_name: family for family in FAMILIES}

PROCESSORS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "vit": ("ViTImageProcessorPil", "ViTForImageClassification", {}),
    "vit-bicubic-384": (
        "ViTImageProcessorPil",
        "ViTForImageClassification",
        {"size": {"height": 384, "width": 384}, "resample": 3},
    ),
    "vit-not-square": ("ViTImageProcessorPil", "ViTForImageClassification", {"size": {"height": 160, "width": 240}}),
    "deit": ("DeiTImageProcessorPil", "DeiTForImageClassification", {}),
    "dinov2": ("BitImageProcessorPil", "Dinov2ForImageClassification", {"size": {"shortest_edge": 256}}),
    "dinov2-odd": ("BitImageProcessorPil", "Dinov2ForImageClassification", {"size": {"shortest_edge": 257}}),
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
    "border-bicubic": {"crop_pct": 1.0, "crop_mode": "border", "interpolation": "bicubic"},
    "border-bilinear": {"crop_pct": 0.9, "crop_mode": "border", "interpolation": "bilinear"},
    "center-not-square": {
        "crop_pct": 0.9,
        "crop_mode": "center",
        "interpolation": "bicubic",
        "input_size": [3, 160, 256],
    },
    "border-not-square": {
        "crop_pct": 0.9,
        "crop_mode": "border",
        "interpolation": "bicubic",
        "input_size": [3, 160, 256],
    },
}


def generated() -> list[bytes]:
    """Small noisy pictures of odd sizes, so that margins are odd and every pixel counts."""
    numbers = np.random.default_rng(0)
    found = []
    for width, height in ((301, 200), (200, 301), (97, 640), (255, 257), (64, 64), (500, 333)):
        low = numbers.integers(0, 256, (height // 4 + 1, width // 4 + 1, 3), dtype=np.uint8)
        image = Image.fromarray(low).resize((width, height), Image.Resampling.BICUBIC)
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        found.append(buffer.getvalue())
    return found


def real(shared: Path) -> list[bytes]:
    folders = (shared / "data" / "imagenet-samples", shared / "data" / "photos")
    return [p.read_bytes() for f in folders for p in sorted(f.iterdir()) if p.suffix.lower() in (".jpeg", ".jpg")]


def upright(data: bytes) -> Image.Image:
    return ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")


def huggingface_case(case: str, folder: Path) -> tuple[PreprocessConfig, Any]:
    name, family, options = PROCESSORS[case]
    processor = getattr(transformers(), name)(**options)
    processor.save_pretrained(folder)
    saved = json.loads((folder / "preprocessor_config.json").read_text())
    config = read_preprocessor(saved, BY_CLASS[family], Folder(folder, str(folder)))

    def reference(image: Image.Image) -> NDArray[np.float64]:
        pixels = processor(image, do_rescale=False, do_normalize=False, return_tensors="np")["pixel_values"][0]
        return np.asarray(pixels, dtype=np.float64).transpose(1, 2, 0)

    return config, reference


def timm_case(case: str) -> tuple[PreprocessConfig, Any]:
    library = timm()
    fields = {"input_size": [3, 224, 224], "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]} | CROPS[case]
    config = _preprocess("config.json", fields)
    transform = library.data.create_transform(**fields, is_training=False, normalize=False)

    def reference(image: Image.Image) -> NDArray[np.float64]:
        return np.asarray(transform(image), dtype=np.float64).transpose(1, 2, 0)

    return config, reference


def largest_difference(config: PreprocessConfig, reference: Any, data: bytes) -> float:
    got = preprocess(data, config, scaled_decode=False).astype(np.float64)
    expected = reference(upright(data))
    assert got.shape == expected.shape
    return float(np.abs(got - expected).max())


@pytest.mark.parametrize("case", PROCESSORS)
def test_pixels_are_those_of_transformers_processors(case: str, tmp_path: Path) -> None:
    config, reference = huggingface_case(case, tmp_path)
    assert max(largest_difference(config, reference, data) for data in generated()) <= 1


@pytest.mark.parametrize("case", CROPS)
def test_pixels_are_those_of_timms_transforms(case: str) -> None:
    config, reference = timm_case(case)
    assert max(largest_difference(config, reference, data) for data in generated()) <= 1


@pytest.mark.shared
@pytest.mark.slow
@pytest.mark.parametrize("case", [*PROCESSORS, *CROPS])
def test_pixels_on_real_pictures(case: str, shared: Path, tmp_path: Path) -> None:
    config, reference = huggingface_case(case, tmp_path) if case in PROCESSORS else timm_case(case)
    pictures = real(shared)
    assert len(pictures) > 50
    worst = max(largest_difference(config, reference, data) for data in pictures)
    print(f"preprocessing {case}: {worst:.0f} of 255 on {len(pictures)} pictures")  # noqa: T201
    assert worst <= 1
