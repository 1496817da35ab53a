from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from model.checkpoint import load_checkpoint
from model.config import ViTConfig
from model.errors import InputError
from model.images.preprocess import preprocess
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


def all_weights(model: VisionTransformer, images: torch.Tensor) -> NDArray[np.float64]:
    """Attention of all tokens to all: [images, layers, heads, N, N], in numpy, from the blocks' inputs."""
    config = model.config
    layers = []
    with torch.inference_mode():
        x = model.embed(images)
        for block in blocks(model):
            attention = block.attn
            y = block.norm1(x)
            qkv = attention.qkv(y).reshape(*y.shape[:2], 3, config.heads, config.width // config.heads)
            q, k = attention.q_norm(qkv[:, :, 0]).double().numpy(), attention.k_norm(qkv[:, :, 1]).double().numpy()
            scores = np.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(config.width // config.heads)
            if attention.relative_position_bias_table is not None:
                table = attention.relative_position_bias_table.double().numpy()
                scores = scores + table[attention.relative_position_index.numpy()].transpose(2, 0, 1)
            scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
            layers.append(scores / scores.sum(axis=-1, keepdims=True))
            x = block(x)[0]
    return np.stack(layers, axis=1)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"registers": 3},
        {"class_token": False, "pool": "mean"},
        {"qk_norm": True},
        {"relative_position_bias": True, "position_embedding": "none"},
        {"drop_remainder": True, "image_size": (27, 44)},
    ],
    ids=["cls", "registers", "no prefix", "qk norm", "relative bias", "remainder"],
)
def test_attention_distance_is_that_of_a_reckoning_by_hand(changes: dict[str, Any]) -> None:
    model = random_model(**changes)
    images = pixels(model)
    prefix = model.config.prefix_tokens
    expected = by_hand(all_weights(model, images), (3, 5), 8, prefix)
    assert np.abs(expected - even_attention_distance(model.config)).max() > 0.1
    # Four queries at a time: fifteen do not divide evenly.
    found = mean_attention_distance(model, [images[:2], images[2:]], max_scores=2 * 15 * 4)
    assert found.shape == (2, 2)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-4)


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


def test_even_attention_is_the_mean_distance_between_patches() -> None:
    model = random_model()
    for block in blocks(model):
        torch.nn.init.zeros_(block.attn.qkv.weight)
        torch.nn.init.zeros_(block.attn.qkv.bias)
    found = mean_attention_distance(model, [pixels(model)])
    assert found.flatten().tolist() == pytest.approx([even_attention_distance(model.config)] * 4, rel=1e-6)
    one_row = ViTConfig.model_validate({**model.config.model_dump(), "image_size": (8, 24)})
    assert even_attention_distance(one_row) == pytest.approx(8 * (0 + 1 + 2 + 1 + 0 + 1 + 2 + 1 + 0) / 9)


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
