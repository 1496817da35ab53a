"""What the service says of its model, name by name."""

from __future__ import annotations

from tests.service.fakes import on_a_loop
from tests.service.web.apps import app


@on_a_loop
async def test_the_model_is_described_by_exactly_these_names_and_values() -> None:
    service = app()
    assert (await service.get("/model")).json == {
        "name": "fake",
        "source": "nowhere",
        "revision": None,
        "format": "fake",
        "architecture": "fake_vit",
        "parameters": 123,
        "input_size": [8, 8],
        "channels": 3,
        "patch_size": 4,
        "grid": [2, 2],
        "layers": 3,
        "heads": 2,
        "width": 8,
        "classes": 10,
        "pool": "cls",
        "temperature": 1.0,
        "multi_label": False,
        "device": "cpu",
        "dtype": "float32",
        "backend": "fake 1.0",
        "compiled": "off",
        "max_batch": 4,
        "batch_sizes": None,
        "preprocessing": {
            "size": [8, 8],
            "resize": "squash",
            "resize_size": [8, 8],
            "interpolation": "nearest",
            "crop_rounding": "half_even",
            "mean": [0.5, 0.5, 0.5],
            "std": [0.5, 0.5, 0.5],
        },
        "attention_source": "cls",
        "attention_methods": ["cls"],
    }
