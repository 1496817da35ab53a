from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from model.checkpoint import load_checkpoint
from model.config import ResNetStem, ViTConfig
from model.errors import InputError
from model.images.preprocess import preprocess
from model.insight.analysis import even_attention_distance, mean_attention_distance, patch_filters, position_similarity
from model.network.vit import VisionTransformer
from tests.timm_reference import transformers


def make(seed: int = 0, **changes: object) -> VisionTransformer:
    """Weights large enough that attention is far from even; a grid that is not square."""
    values: dict[str, object] = {
        "image_size": (24, 40),
        "patch_size": 8,
        "width": 16,
        "depth": 2,
        "heads": 2,
        "mlp_width": 32,
        "num_classes": 3,
    }
    model = VisionTransformer(ViTConfig.model_validate(values | changes)).eval()
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=1.0, generator=generator)
    return model


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
        for block in model.blocks:
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
            x, _ = block(x)
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
def test_attention_distance_is_that_of_a_reckoning_by_hand(
    changes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make(**changes)
    images = pixels(model)
    prefix = model.config.prefix_tokens
    expected = by_hand(all_weights(model, images), (3, 5), 8, prefix)
    assert np.abs(expected - even_attention_distance(model.config)).max() > 0.1
    monkeypatch.setattr(
        "model.insight.analysis._SCORES", 2 * 15 * 4
    )  # four queries at a time: fifteen do not divide evenly
    found = mean_attention_distance(model, [images[:2], images[2:]])
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
    model = make()
    for block in model.blocks:
        torch.nn.init.zeros_(block.attn.qkv.weight)
        torch.nn.init.zeros_(block.attn.qkv.bias)
    found = mean_attention_distance(model, [pixels(model)])
    assert found.flatten().tolist() == pytest.approx([even_attention_distance(model.config)] * 4, rel=1e-6)
    one_row = ViTConfig.model_validate({**model.config.model_dump(), "image_size": (8, 24)})
    assert even_attention_distance(one_row) == pytest.approx(8 * (0 + 1 + 2 + 1 + 0 + 1 + 2 + 1 + 0) / 9)


def test_measuring_attention_on_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="no images"):
        mean_attention_distance(make(), [])


@pytest.mark.parametrize("embedding", ["convolution", "linear"])
def test_patch_filters_are_the_directions_the_filters_were_made_from(embedding: str) -> None:
    model = make(patch_embedding=embedding)
    generator = torch.Generator().manual_seed(2)
    basis = torch.linalg.qr(torch.randn(192, 2, generator=generator)).Q  # [C*P*P, 2]
    strength = torch.randn(16, 2, generator=generator) * torch.tensor([5.0, 1.0])
    weight = strength @ basis.T + 7.0  # what all filters share is no difference between them
    with torch.no_grad():
        parameter = model.get_parameter("patch_embed.proj.weight")
        parameter.copy_(weight.reshape(parameter.shape))
    found = patch_filters(model)
    assert found.components.shape == (16, 3, 8, 8)
    assert found.explained[:2].sum().item() == pytest.approx(1, abs=1e-4)
    spanned = found.components[:2].reshape(2, -1) @ basis
    np.testing.assert_allclose((spanned @ spanned.T).numpy(), np.eye(2), atol=1e-3)
    assert found.explained.tolist() == sorted(found.explained.tolist(), reverse=True)
    assert patch_filters(model, 3).components.shape == (3, 3, 8, 8)


def test_a_hybrid_has_no_patch_filters() -> None:
    model = make(image_size=(32, 32), patch_size=16, stem=ResNetStem(layers=(1,)))
    with pytest.raises(InputError, match="ResNet stem"):
        patch_filters(model)


@pytest.mark.parametrize(
    "changes", [{}, {"registers": 2}, {"position_prefix": False}, {"class_token": False, "pool": "mean"}], ids=str
)
def test_position_similarity_leaves_the_prefix_out_and_keeps_rows_and_columns(changes: dict[str, object]) -> None:
    model = make(**changes)
    assert model.pos_embed is not None
    found = position_similarity(model)
    assert found.shape == (3, 5, 3, 5)
    patches = model.pos_embed[0, -15:]
    for i, j, k, m in ((0, 0, 0, 0), (1, 4, 2, 0), (2, 3, 0, 1)):
        expected = torch.cosine_similarity(patches[5 * i + j], patches[5 * k + m], dim=0)
        assert found[i, j, k, m].item() == pytest.approx(expected.item(), abs=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"position_embedding": "sincos2d"}, "sincos2d"),
        ({"position_embedding": "none"}, "none"),
        ({"position_embedding": "none", "relative_position_bias": True}, "relative biases"),
    ],
    ids=["fixed", "none", "relative"],
)
def test_positions_that_were_not_learned_are_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        position_similarity(make(**changes))


@pytest.fixture(scope="module")
def deit(shared: Path) -> VisionTransformer:
    return load_checkpoint(str(shared / "weights" / "deit_tiny_imagenet")).build()


@pytest.mark.shared
def test_a_trained_model_places_each_position_next_to_itself_its_row_and_its_column(deit: VisionTransformer) -> None:
    found = position_similarity(deit).numpy()
    gh, gw = deit.config.grid
    flat = found.reshape(gh * gw, gh * gw)
    assert (flat.argmax(axis=1) == np.arange(gh * gw)).all()
    row, column = np.divmod(np.arange(gh * gw), gw)
    itself = np.eye(gh * gw, dtype=bool)
    same_row = (row[:, None] == row) & ~itself
    same_column = (column[:, None] == column) & ~itself
    neither = ~(same_row | same_column | itself)
    for mates in (same_row, same_column):  # of every single position, not only on average
        with_mates = (flat * mates).sum(1) / mates.sum(1)
        with_others = (flat * neither).sum(1) / neither.sum(1)
        assert (with_mates > with_others + 0.2).all()
    neighbour = np.abs(row[:, None] - row) + np.abs(column[:, None] - column) == 1
    assert flat[neighbour].min() > 0.8


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


@pytest.mark.shared
def test_patch_filters_of_a_trained_model_are_far_from_even(deit: VisionTransformer) -> None:
    found = patch_filters(deit)
    # 192 filters of white noise would need far more than 28 of 192 directions for this share.
    assert found.explained.sum().item() > 0.4
    centre = found.components[:, :, 4:12, 4:12].square().sum(dim=(1, 2, 3))
    assert (centre > 0.25).float().mean() > 0.8  # the middle quarter of a patch holds more than its share
