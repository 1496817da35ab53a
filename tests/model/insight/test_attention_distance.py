from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from model.checkpoint import load_checkpoint
from model.config import ViTConfig
from model.errors import FigureError, InputError
from model.images.preprocess import preprocess
from model.insight import figures
from model.insight.analyses import even_attention_distance, mean_attention_distance
from model.network.vit import VisionTransformer
from tests.model.blocks import blocks
from tests.model.insight.models import random_model
from tests.timm_reference import transformers


def pixels(model: VisionTransformer, count: int = 3) -> torch.Tensor:
    config = model.config
    return torch.randn(
        count, config.in_channels, *config.image_size, generator=torch.Generator().manual_seed(1), dtype=torch.float32
    )


def by_hand(weights: NDArray[np.float64], grid: tuple[int, int], patch: int, prefix: int) -> NDArray[np.float64]:
    """[images, layers, heads, N, N] over all tokens -> [layers, heads], with loops and nothing clever."""
    images, layers, heads = weights.shape[:3]
    places = [(row * patch, column * patch) for row in range(grid[0]) for column in range(grid[1])]
    found = np.zeros((layers, heads))
    for layer in range(layers):
        for head in range(heads):
            distances = []
            for image in range(images):
                for i, query in enumerate(places):
                    row = weights[image, layer, head, prefix + i, prefix:]
                    away = [math.dist(query, key) for key in places]
                    distances.append(float((row * away).sum() / row.sum()))
            found[layer, head] = np.mean(distances)
    return found


@pytest.mark.parametrize("changes", [{}, {"registers": 3}, {"class_token": False, "pool": "mean"}], ids=str)
def test_even_attention_is_the_mean_distance_between_patches(changes: dict[str, Any]) -> None:
    model = random_model(**changes)
    config = model.config
    [block] = list(blocks(model))[:1]
    with torch.no_grad():
        block.attn.qkv.weight.zero_()
        block.attn.qkv.bias.zero_()
    even = mean_attention_distance(model, [pixels(model)])[0]
    assert even.tolist() == pytest.approx([even_attention_distance(config)] * 2, rel=1e-6)
    few = mean_attention_distance(model, [pixels(model)], max_scores=2 * 15 * 4)[0]  # fifteen do not divide evenly
    torch.testing.assert_close(few, even)
    one_row = ViTConfig.model_validate({**config.model_dump(), "image_size": (8, 24)})
    assert even_attention_distance(one_row) == pytest.approx(8 * (0 + 1 + 2 + 1 + 0 + 1 + 2 + 1 + 0) / 9)


def test_attention_distance_agrees_with_the_weights_that_transformers_returns(tmp_path: Path) -> None:
    library = transformers()
    torch.manual_seed(0)
    config = library.ViTConfig(
        hidden_size=24,
        num_hidden_layers=3,
        num_attention_heads=3,
        intermediate_size=48,
        image_size=[24, 56],
        patch_size=8,
        num_labels=3,
    )
    theirs = library.ViTForImageClassification._from_config(config, attn_implementation="eager").eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.6)
    theirs.save_pretrained(tmp_path)
    processor = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": 24, "width": 56},
        "resample": 2,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    ours = load_checkpoint(str(tmp_path)).build()
    images = pixels(ours)
    with torch.inference_mode():
        attentions = theirs(images, output_attentions=True).attentions  # a layer each [B, heads, N, N]
    expected = by_hand(torch.stack(attentions, dim=1).double().numpy(), (3, 7), 8, prefix=1)
    np.testing.assert_allclose(mean_attention_distance(ours, [images]).numpy(), expected, rtol=1e-4)


def test_measuring_attention_on_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="no images"):
        mean_attention_distance(random_model(), [])


@pytest.mark.shared
def test_a_trained_model_has_near_and_far_heads_early_and_far_ones_late(deit: VisionTransformer, shared: Path) -> None:
    config = load_checkpoint(str(shared / "weights" / "deit_tiny_imagenet")).preprocess
    files = sorted((shared / "data" / "imagenet-samples").glob("*.JPEG"))[::5]
    mean, std = (torch.tensor(values).reshape(3, 1, 1) for values in (config.mean, config.std))
    pictures = np.stack([preprocess(file.read_bytes(), config) for file in files])
    batch = (torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 255 - mean) / std
    distance = mean_attention_distance(deit, batch.split(5)).numpy()
    early, late = distance[:4], distance[-4:]
    assert early.min() < 32  # within two patches
    assert early.max() > 80  # over a third of the picture
    assert late.min() > 80
    assert np.ptp(early) > 2 * np.ptp(late)
    assert early.mean() < distance[4:8].mean() < late.mean()
    assert late.mean() > 1.5 * early.mean()
    assert distance.max() < 1.1 * even_attention_distance(deit.config)


def test_the_figure_is_the_same_for_the_same_numbers_and_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a.png", "b.png"):
        figures.attention_distance(np.ones((2, 2)), tmp_path / name, even=1.0)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert "matplotlib.pyplot" not in sys.modules
    with pytest.raises(FigureError, match="absent"):
        figures.attention_distance(np.ones((2, 2)), tmp_path / "absent" / "c.png", even=1.0)
    monkeypatch.setattr("model.insight.figures.find_spec", lambda name: None)
    with pytest.raises(FigureError, match=r"pip install 'vitserve\[figures\]'"):
        figures.attention_distance(np.ones((2, 2)), tmp_path / "c.png", even=1.0)
