"""Names of people's own are recognised where their mapping is complete and unique, and the answers are exact then."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from model.errors import CheckpointError
from tests.model.checkpoint.home_made import PLAIN, load, made
from tests.model.checkpoint.parity import assert_same_logits, randomise
from tests.timm_reference import declare_torchvision_operators

State = dict[str, Tensor]


def vit_pytorch() -> Any:
    declare_torchvision_operators()
    pytest.importorskip("einops", reason="einops is not installed")
    return pytest.importorskip("vit_pytorch", reason="vit-pytorch is not installed")


SMALL = {"image_size": 16, "patch_size": 4, "num_classes": 5, "dim": 48, "depth": 2, "mlp_dim": 64}


@pytest.mark.parametrize(
    ("options", "architecture"),
    [
        ({"heads": 4, "dim_head": 16}, "vit,num_heads=4"),  # inner width 64
        ({"heads": 3, "dim_head": 16, "pool": "mean"}, "vit,num_heads=3"),
        ({"heads": 1, "dim_head": 48}, "vit"),  # no projection of the attention's output
        ({"heads": 2, "dim_head": 24, "mlp_dim": 48}, "vit,num_heads=2"),  # square layers
    ],
)
def test_vit_pytorch(options: dict[str, Any], architecture: str, tmp_path: Path) -> None:
    model = vit_pytorch().ViT(**(SMALL | options)).eval()
    randomise(model)
    checkpoint = load(model.state_dict(), tmp_path, architecture)
    assert_same_logits(checkpoint, model, f"vit-pytorch {options}")
    assert "names inferred, as vit-pytorch has them: " in checkpoint.notes[0]
    assert "act_layer=gelu, as vit-pytorch has it (VIT_ARCHITECTURE)" in checkpoint.assumed


def test_vit_pytorchs_simple_vit_has_positions_that_no_tensor_holds(tmp_path: Path) -> None:
    model = vit_pytorch().SimpleViT(**SMALL, heads=3, dim_head=16).eval()
    randomise(model)
    assert_same_logits(load(model.state_dict(), tmp_path, "vit,num_heads=3"), model, "SimpleViT")


def test_the_number_of_heads_of_vit_pytorch_is_asked_for(tmp_path: Path) -> None:
    model = vit_pytorch().ViT(**SMALL, heads=4, dim_head=12)
    with pytest.raises(CheckpointError, match=r"num_heads: .* --architecture vit,num_heads=N --.*a divisor of 48\)$"):
        load(model.state_dict(), tmp_path)


class EncoderViT(nn.Module):
    """A ViT around torch's own encoder, which most people's second attempt is."""

    def __init__(self, *, norm_first: bool, activation: str = "gelu", hidden: int = 64, position: int = 17) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 48, 4, 4)
        self.cls = nn.Parameter(torch.zeros(1, 1, 48))
        self.positions = nn.Parameter(torch.zeros(1, position, 48))
        layer = nn.TransformerEncoderLayer(
            48, 3, hidden, activation=activation, batch_first=True, norm_first=norm_first
        )
        self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(48), enable_nested_tensor=False)
        self.classifier = nn.Sequential(nn.Dropout(0.1), nn.Linear(48, 5))

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.embed(pixels).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls.expand(len(x), -1, -1), x), dim=1) + self.positions
        y: Tensor = self.classifier(self.encoder(x)[:, 0])
        return y


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize(("activation", "hidden"), [("relu", 64), ("gelu", 48)])
def test_torchs_own_encoder(norm_first: bool, activation: str, hidden: int, tmp_path: Path) -> None:
    model = EncoderViT(norm_first=norm_first, activation=activation, hidden=hidden).eval()
    randomise(model)
    with pytest.raises(
        CheckpointError,
        match=r"norm_order=pre,act_layer=gelu,global_pool=token.*only usual.*pre, post or res_post",
    ):
        load(model.state_dict(), tmp_path)
    order = "pre" if norm_first else "post"
    given = f"vit,num_heads=3,norm_order={order},act_layer={activation},global_pool=token"
    assert_same_logits(load(model.state_dict(), tmp_path, given), model, f"TransformerEncoder {order}")


def renamed(state: State, *rules: tuple[str, str]) -> State:
    result = {}
    for name, tensor in state.items():
        for pattern, replacement in rules:
            name = re.sub(pattern, replacement, name)  # noqa: PLW2901
        result[name] = tensor
    return result


def apart(state: State, *names: str, heads: int = 1) -> State:
    """Give queries, keys and values layers of their own, for each head where there are several."""
    result = {}
    for name, tensor in state.items():
        if ".qkv." in name:
            for part, rows in zip(names, tensor.chunk(3), strict=True):
                for head, own in enumerate(rows.chunk(heads)):
                    result[name.replace("qkv", part.format(head))] = own
        else:
            result[name] = tensor
    return result


STYLES: dict[str, tuple[str, Callable[[State], State]]] = {
    "queries, keys and values apart": (
        PLAIN,
        lambda s: renamed(apart(s, "to_q", "to_k", "to_v"), ("blocks", "layers")),
    ),
    "a layer for each head": (
        PLAIN.replace("num_heads=3,", ""),
        lambda s: apart(s, "heads.{}.query", "heads.{}.key", "heads.{}.value", heads=3),
    ),
    "vit-pytorch of 2021": (
        "vit,num_heads=3,norm_order=pre,global_pool=token,norm_eps=1e-6",
        lambda s: (
            renamed(
                s,
                (r"blocks\.(\d+)\.norm1", r"transformer.layers.\1.0.norm"),
                (r"blocks\.(\d+)\.norm2", r"transformer.layers.\1.1.norm"),
                (r"blocks\.(\d+)\.attn\.qkv", r"transformer.layers.\1.0.fn.to_qkv"),
                (r"blocks\.(\d+)\.attn\.proj", r"transformer.layers.\1.0.fn.to_out.0"),
                (r"blocks\.(\d+)\.mlp\.fc1", r"transformer.layers.\1.1.fn.net.0"),
                (r"blocks\.(\d+)\.mlp\.fc2", r"transformer.layers.\1.1.fn.net.3"),
                (r"^norm", "mlp_head.0"),
                (r"^head", "mlp_head.1"),
                ("pos_embed", "pos_embedding"),
                (r"patch_embed\.proj", "to_patch_embedding.1"),
            )
            | {"to_patch_embedding.1.weight": s["patch_embed.proj.weight"].permute(0, 2, 3, 1).flatten(1)}
        ),
    ),
    "transformers": (
        "vit,num_heads=3,norm_eps=1e-6",
        lambda s: renamed(
            apart(s, "attention.query", "attention.key", "attention.value"),
            (r"blocks\.(\d+)\.attn\.(?=attention)", r"vit.encoder.layer.\1.attention."),
            (r"blocks\.(\d+)\.attn\.proj", r"vit.encoder.layer.\1.attention.output.dense"),
            (r"blocks\.(\d+)\.norm1", r"vit.encoder.layer.\1.layernorm_before"),
            (r"blocks\.(\d+)\.norm2", r"vit.encoder.layer.\1.layernorm_after"),
            (r"blocks\.(\d+)\.mlp\.fc1", r"vit.encoder.layer.\1.intermediate.dense"),
            (r"blocks\.(\d+)\.mlp\.fc2", r"vit.encoder.layer.\1.output.dense"),
            (r"^norm", "vit.layernorm"),
            (r"^head", "classifier"),
            ("pos_embed", "vit.embeddings.position_embeddings"),
            ("^cls_token", "vit.embeddings.cls_token"),
            (r"patch_embed\.proj", "vit.embeddings.patch_embeddings.projection"),
        ),
    ),
    "words of their own": (
        f"{PLAIN},qkv_order=3hd",
        lambda s: renamed(
            s,
            (r"blocks\.(\d+)", r"encoder.block_\1"),
            ("norm1", "attention_norm"),
            ("norm2", "mlp_norm"),
            (r"attn\.proj", "attention.out"),
            (r"attn\.qkv", "attention.qkv_proj"),
            (r"mlp\.fc", "ffn.dense"),
            ("^norm", "final_ln"),
            (r"patch_embed\.proj", "patchify.conv"),
            ("cls_token", "class_embedding"),
        ),
    ),
    "blocks counted from one": (
        PLAIN,
        lambda s: renamed(renamed(s, ("blocks.1", "layers.2")), ("blocks.0", "layers.1")),
    ),
    "positions of an embedding": (
        PLAIN,
        lambda s: renamed(s, ("blocks", "layers"), ("^pos_embed$", "pos.weight")) | {"pos.weight": s["pos_embed"][0]},
    ),
}


@pytest.mark.parametrize("order", ["3hd", "h3d", "hd3", "d3h", "3dh", "dh3"])
def test_the_order_of_a_fused_projections_rows_is_asked_for(order: str, tmp_path: Path) -> None:
    """No shape tells it: tutorials have heads first, or queries, keys and values last."""
    model = made(heads=4, qkv_order=order)
    state = renamed(dict(model.state_dict()), (r"attn\.qkv", "attn.qkv_proj"))
    given = PLAIN.replace("num_heads=3", "num_heads=4")
    timms = f"vit_tiny_patch16_224,embed_dim=48,depth=2,patch_size=4,{given.removeprefix('vit,')}"
    for architecture in (given, timms):
        with pytest.raises(CheckpointError, match=r"no file says its qkv_order: .*qkv_order=3hd"):
            load(state, tmp_path, architecture)
        assert_same_logits(load(state, tmp_path, f"{architecture},qkv_order={order}"), model, f"qkv {order}")
    with pytest.raises(CheckpointError, match="qkv_order"):
        load(state, tmp_path, f"{given},qkv_order=hhd")


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        (
            PLAIN.replace("num_heads=3", "num_heads=2"),
            "tensors tell num_heads=3, but VIT_ARCHITECTURE says num_heads=2",
        ),
        (f"{PLAIN},qkv_order=h3d", "tensors tell qkv_order=3hd, but VIT_ARCHITECTURE says qkv_order=h3d"),
        (
            "vit_small_patch16_224,patch_size=4,depth=2,mlp_ratio=2",
            "tell num_heads=3, but VIT_ARCHITECTURE says num_heads=6",
        ),
    ],
)
def test_what_the_tensors_tell_is_not_overruled(architecture: str, message: str, tmp_path: Path) -> None:
    state = apart(dict(made().state_dict()), "heads.{}.query", "heads.{}.key", "heads.{}.value", heads=3)
    with pytest.raises(CheckpointError, match=message):
        load(state, tmp_path, architecture)


def test_heads_that_layers_tell_need_not_be_stated_beside_timms_name(tmp_path: Path) -> None:
    model = made(heads=4)
    state = apart(dict(model.state_dict()), "heads.{}.query", "heads.{}.key", "heads.{}.value", heads=4)
    given = "vit_tiny_patch16_224,embed_dim=48,depth=2,patch_size=4,norm_order=pre"
    assert_same_logits(load(state, tmp_path, given), model, "heads by layers")


def test_how_a_patch_is_counted_is_asked_for_beside_timms_name(tmp_path: Path) -> None:
    model = made()
    state = renamed(dict(model.state_dict()), ("blocks", "layers"))
    weight = state["patch_embed.proj.weight"]
    state["patch_embed.proj.weight"] = weight.permute(0, 2, 3, 1).flatten(1)
    given = "vit_tiny_patch16_224,embed_dim=48,depth=2,patch_size=4,num_heads=3,norm_order=pre"
    with pytest.raises(CheckpointError, match=r"no file says its patch_order: .*patch_order=channels_last"):
        load(state, tmp_path, given)
    assert_same_logits(load(state, tmp_path, f"{given},patch_order=channels_last"), model, "linear patches")


@pytest.mark.parametrize("style", STYLES)
def test_a_style_of_names_is_recognised(style: str, tmp_path: Path) -> None:
    model = made(hidden=96)
    architecture, change = STYLES[style]
    state = change(dict(model.state_dict()))
    shuffled = {name: state[name] for name in sorted(state, key=lambda name: name[::-1])}
    for tensors in (state, shuffled):
        checkpoint = load(tensors, tmp_path, architecture)
        assert_same_logits(checkpoint, model, style)
        assert any(note.startswith("names inferred") for note in checkpoint.notes)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([("norm1", "a"), ("norm2", "b")], r"which of 'a' and 'b' belongs to the attention is not clear"),
        ([(r"mlp\.fc1", "first"), (r"mlp\.fc2", "second")], r"which of a block's layers .* is not clear: .*first"),
        ([("qkv", "mixed")], "no projections to queries, keys and values that names tell apart"),
        ([("^norm", "embedding_norm")], r"the part of 'embedding_norm' is not clear"),
        ([("cls_token", "extra")], r"the part of 'extra' \[1, 1, 48\] is not clear"),
        ([("blocks.1", "later.0")], "holds 2 copies of a network, layers and later"),
    ],
)
def test_what_is_not_clear_is_refused_with_the_way_out(
    rules: list[tuple[str, str]], message: str, tmp_path: Path
) -> None:
    state = renamed(dict(made(hidden=48).state_dict()), ("blocks", "layers"), ("layers.1", "blocks.1"), *rules)
    state = renamed(state, ("^blocks", "layers"))
    with pytest.raises(CheckpointError, match=message) as refusal:
        load(state, tmp_path, PLAIN)
    assert "inspect FILE --keys draft.toml" in str(refusal.value) or "--weights" in str(refusal.value)


def test_what_names_tell_counts_beside_timms_name_of_the_architecture(tmp_path: Path) -> None:
    model = made(hidden=192, norm_first=False)
    rules = [
        (r"blocks\.(\d)\.attn\.qkv", r"layers.\1.0.0.in_proj"),
        (r"blocks\.(\d)\.attn\.proj", r"layers.\1.0.0.out_proj"),
        (r"blocks\.(\d)\.norm1", r"layers.\1.0.1"),
        (r"blocks\.(\d)\.mlp\.fc1", r"layers.\1.1.0"),
        (r"blocks\.(\d)\.mlp\.fc2", r"layers.\1.1.2"),
        (r"blocks\.(\d)\.norm2", r"layers.\1.1.3"),
    ]
    state = renamed(dict(model.state_dict()), *rules)  # each norm stands after its branch, in one sequence with it
    given = "vit_tiny_patch16_224,embed_dim=48,depth=2,patch_size=4,num_heads=3,qkv_order=3hd"
    assert_same_logits(load(state, tmp_path, given), model, "post-norm by the places of the norms")
