"""The network against a reference that forms every attention matrix in full."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import ViTConfig
from model.network.layers import attention
from model.network.layers.block import Mlp
from model.network.layers.patch_embed import PatchEmbed
from model.network.layers.position import resize_position_embedding
from model.network.vit import VisionTransformer
from tests.model.blocks import blocks


def make_config(**changes: object) -> ViTConfig:
    values: dict[str, object] = {
        "image_size": (32, 48),
        "patch_size": 8,
        "width": 48,
        "depth": 3,
        "heads": 3,
        "mlp_width": 96,
        "num_classes": 7,
    }
    return ViTConfig.model_validate(values | changes)


def make_model(config: ViTConfig) -> VisionTransformer:
    """Set all parameters to random values, so that a missing term shows."""
    torch.manual_seed(0)
    model = VisionTransformer(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=0.02, std=0.3 if parameter.ndim > 1 else 0.5)
    return model


def reference(model: VisionTransformer, pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the paper's equations: logits [B, K] and attention [B, layers, heads, N, N]."""
    c = model.config
    head_dim = c.width // c.heads
    assert isinstance(model.patch_embed, PatchEmbed)
    assert model.patch_embed.proj.bias is not None
    x = F.unfold(pixels, c.patch_size, stride=c.patch_size).transpose(1, 2)
    x = x @ model.patch_embed.proj.weight.flatten(1).T + model.patch_embed.proj.bias
    if model.cls_token is not None:
        x = torch.cat([model.cls_token.repeat(len(x), 1, 1), x], dim=1)
    assert model.pos_embed is not None
    x = x + model.pos_embed
    matrices = []
    for block in blocks(model):
        mlp = block.mlp
        assert isinstance(mlp, Mlp)
        y = F.layer_norm(x, (c.width,), block.norm1.weight, block.norm1.bias, c.norm_eps)
        q, k, v = (y @ block.attn.qkv.weight.T + block.attn.qkv.bias).split(c.width, dim=-1)
        split = [t.unflatten(-1, (c.heads, head_dim)).transpose(1, 2) for t in (q, k, v)]
        attention = torch.softmax(split[0] @ split[1].transpose(-1, -2) / head_dim**0.5, dim=-1)
        matrices.append(attention)
        y = (attention @ split[2]).transpose(1, 2).flatten(2)
        x = x + y @ block.attn.proj.weight.T + block.attn.proj.bias
        y = F.layer_norm(x, (c.width,), block.norm2.weight, block.norm2.bias, c.norm_eps)
        y = F.gelu(y @ mlp.fc1.weight.T + mlp.fc1.bias)
        x = x + y @ mlp.fc2.weight.T + mlp.fc2.bias
    prefix = int(c.class_token)
    norm = model.fc_norm if c.norm_after_pool else model.norm
    assert isinstance(norm, nn.LayerNorm)
    if c.norm_after_pool:
        pooled = x[:, prefix:].mean(dim=1)
        pooled = F.layer_norm(pooled, (c.width,), norm.weight, norm.bias, c.norm_eps)
    else:
        x = F.layer_norm(x, (c.width,), norm.weight, norm.bias, c.norm_eps)
        pooled = x[:, 0] if c.pool == "cls" else x[:, prefix:].mean(dim=1)
    return pooled @ model.head.weight.T + model.head.bias, torch.stack(matrices, dim=1)


@pytest.mark.parametrize("batch", [1, 5])
def test_cls_row_is_that_of_the_full_matrix(
    batch: int,
) -> None:
    model = make_model(make_config())
    pixels = torch.randn(batch, 3, 32, 48, generator=torch.Generator().manual_seed(1))
    logits, matrices = reference(model, pixels)

    output = model(pixels, attention_layers=range(3))

    assert output.attention is not None
    torch.testing.assert_close(output.attention, matrices[:, :, :, 0], rtol=0, atol=1e-5)
    torch.testing.assert_close(output.logits, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("changes", [{"class_token": False}, {"norm_after_pool": True}, {}])
def test_a_mean_pooled_row_is_a_query_mean(
    changes: dict[str, object],
) -> None:
    model = make_model(make_config(pool="mean", **changes))
    pixels = torch.randn(3, 3, 32, 48, generator=torch.Generator().manual_seed(2))
    logits, matrices = reference(model, pixels)

    output = model(pixels, attention_layers=(2,))

    assert output.attention is not None
    expected = matrices[:, 2, :, model.config.prefix_tokens :].mean(dim=-2)
    torch.testing.assert_close(output.attention[:, 0], expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(output.logits, logits, rtol=1e-4, atol=1e-4)


def test_layers_come_in_the_order_asked_for() -> None:
    model = make_model(make_config())
    pixels = torch.randn(2, 3, 32, 48)
    every = model(pixels, (0, 1, 2)).attention
    chosen = model(pixels, (2, 0)).attention
    torch.testing.assert_close(chosen, every[:, [2, 0]])
    assert model(pixels).attention is None


def test_resized_positions_keep_their_order() -> None:
    rows, columns = torch.meshgrid(torch.linspace(0, 1, 8), torch.linspace(0, 1, 8), indexing="ij")
    grid = torch.stack([rows, columns], dim=-1).reshape(1, 64, 2)
    prefix = torch.tensor([[[5.0, -5.0]]])

    resized = resize_position_embedding(
        torch.cat([prefix, grid], dim=1), prefix_tokens=1, old_grid=(8, 8), new_grid=(16, 4)
    )

    assert resized.shape == (1, 65, 2)
    torch.testing.assert_close(resized[:, :1], prefix)
    picture = resized[0, 1:].reshape(16, 4, 2)
    assert (picture[1:, :, 0] - picture[:-1, :, 0]).min() > 0  # rising from top to bottom
    assert (picture[:, 1:, 1] - picture[:, :-1, 1]).min() > 0  # and from left to right


def test_an_equal_grid_keeps_its_positions() -> None:
    pos_embed = torch.randn(1, 17, 8)
    same = resize_position_embedding(pos_embed, prefix_tokens=1, old_grid=(4, 4), new_grid=(4, 4))
    assert same is pos_embed


@pytest.mark.parametrize("distilled", [False, True])
@pytest.mark.parametrize("layers", [(), (1,), (0, 1)])
def test_skipped_tokens_do_not_change_logits(distilled: bool, layers: tuple[int, ...]) -> None:
    config = make_config(distillation_token=distilled, distillation_head=distilled)
    model = make_model(config)
    pixels = torch.randn(3, 3, 32, 48)
    with torch.no_grad():
        spared = model(pixels, layers)
        whole = model(pixels, layers, all_tokens=True)
    torch.testing.assert_close(spared.logits, whole.logits, atol=1e-5, rtol=1e-5)
    if layers:
        torch.testing.assert_close(spared.attention, whole.attention, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("limit", [1 << 30, 3 * 2 * 9 * 9 * 2, 10])
def test_chunked_attention_is_attention(
    dtype: torch.dtype, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        attention, "SCORES_BYTES", limit
    )  # all at once, three images at a time, no images
    q, k, v = torch.randn(3, 7, 2, 9, 16).to(dtype).unbind(0)
    for queries in (q, q[:, :, :1]):
        expected = torch.nn.functional.scaled_dot_product_attention(
            queries.float(), k.float(), v.float()
        )
        got = attention.chunked_attention(queries, k, v)
        assert got.dtype == dtype
        torch.testing.assert_close(
            got.float(), expected, atol=3e-2 if dtype == torch.bfloat16 else 1e-5, rtol=0
        )
