"""JAX's .npz files give timm's logits."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model.checkpoint import load_checkpoint
from model.errors import CheckpointError
from tests.model.checkpoint.parity import assert_same_logits, preprocess_file, randomise
from tests.timm_reference import timm


def jax_arrays(model: Any, *, big_vision: bool = False) -> dict[str, Any]:
    """Return a timm model's arrays in the published layout of a ViT.

    The inverse of the conversion that vit_jax's users need.
    """
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    heads = model.blocks[0].attn.num_heads
    width = model.embed_dim
    mha, mlp, norm2 = ("0", "0", "1") if big_vision else ("1", "3", "2")
    arrays = {
        "embedding/kernel": state["patch_embed.proj.weight"].transpose(2, 3, 1, 0),
        "embedding/bias": state["patch_embed.proj.bias"],
        "Transformer/encoder_norm/scale": state["norm.weight"],
        "Transformer/encoder_norm/bias": state["norm.bias"],
        "head/kernel": state["head.weight"].T,
        "head/bias": state["head.bias"],
        ("pos_embedding" if big_vision else "Transformer/posembed_input/pos_embedding"): state[
            "pos_embed"
        ],
    }
    if "cls_token" in state:
        arrays["cls"] = state["cls_token"]

    def norm(theirs: str, ours: str) -> None:
        arrays.update(
            {f"{theirs}/scale": state[f"{ours}.weight"], f"{theirs}/bias": state[f"{ours}.bias"]}
        )

    def attention(theirs: str, ours: str, *fused: str) -> None:
        """Return the arrays, with fused queries, keys and values in the layers `fused`."""
        weights, biases = (
            np.split(np.concatenate([state[f"{ours}.{layer}.{kind}"] for layer in fused]), 3)
            for kind in ("weight", "bias")
        )
        for part, weight, bias in zip(("query", "key", "value"), weights, biases, strict=True):
            arrays[f"{theirs}/{part}/kernel"] = weight.T.reshape(width, heads, -1)
            arrays[f"{theirs}/{part}/bias"] = bias.reshape(heads, -1)
        arrays[f"{theirs}/out/kernel"] = state[f"{ours}.proj.weight"].T.reshape(heads, -1, width)
        arrays[f"{theirs}/out/bias"] = state[f"{ours}.proj.bias"]

    def feed(theirs: str, ours: str) -> None:
        for i in (0, 1):
            arrays[f"{theirs}/Dense_{i}/kernel"] = state[f"{ours}.fc{i + 1}.weight"].T
            arrays[f"{theirs}/Dense_{i}/bias"] = state[f"{ours}.fc{i + 1}.bias"]

    for index in range(len(model.blocks)):
        block = f"Transformer/encoderblock_{index}"
        ours = f"blocks.{index}"
        norm(f"{block}/LayerNorm_0", f"{ours}.norm1")
        norm(f"{block}/LayerNorm_{norm2}", f"{ours}.norm2")
        attention(f"{block}/MultiHeadDotProductAttention_{mha}", f"{ours}.attn", "qkv")
        feed(f"{block}/MlpBlock_{mlp}", f"{ours}.mlp")
    if model.attn_pool is not None:
        arrays["MAPHead_0/probe"] = state["attn_pool.latent"]
        attention("MAPHead_0/MultiHeadDotProductAttention_0", "attn_pool", "q", "kv")
        norm("MAPHead_0/LayerNorm_0", "attn_pool.norm")
        feed("MAPHead_0/MlpBlock_0", "attn_pool.mlp")
    return {name: np.ascontiguousarray(array) for name, array in arrays.items()}


def stacked(arrays: dict[str, np.ndarray], depth: int) -> dict[str, np.ndarray]:
    """Stack blocks as big_vision's scan does: one array with a leading dimension for all blocks."""
    first = "Transformer/encoderblock_0/"
    rest = {n: a for n, a in arrays.items() if "encoderblock_" not in n}
    for name in [n for n in arrays if n.startswith(first)]:
        parts = [arrays[name.replace("encoderblock_0", f"encoderblock_{i}")] for i in range(depth)]
        rest[name.replace("encoderblock_0", "encoderblock")] = np.stack(parts)
    return rest


JAX: dict[str, tuple[dict[str, Any], bool, str, bool]] = {
    "augreg": ({}, False, "", False),
    "augreg-opt": ({}, False, "opt/target/", False),
    "big-vision-gap": (
        {"class_token": False, "global_pool": "avg", "fc_norm": False},
        True,
        "params/",
        False,
    ),
    "big-vision-cls": ({"no_embed_class": True}, True, "params/", False),
    "big-vision-map": ({"class_token": False, "global_pool": "map"}, True, "params/img/", False),
    "big-vision-scan": ({"class_token": False, "global_pool": "map"}, True, "params/img/", True),
}


@pytest.mark.parametrize("case", JAX)
def test_jax_files_give_timms_logits(case: str, tmp_path: Path) -> None:
    options, big_vision, prefix, scan = JAX[case]

    def model() -> Any:
        made = timm().create_model(
            "vit_tiny_patch16_224",
            img_size=48,
            depth=3,
            embed_dim=48,
            num_classes=6,
            act_layer="gelu_tanh",
            **options,
        )
        return made.eval()

    source = model()
    randomise(source)
    arrays = jax_arrays(source, big_vision=big_vision)
    if scan:
        arrays = stacked(arrays, 3)
    file = tmp_path / "model.npz"
    np.savez(file, **{prefix + name: array for name, array in arrays.items()})
    loaded = model()
    loaded.load_pretrained(str(file))
    checkpoint = load_checkpoint(
        str(file), preprocess=preprocess_file(tmp_path, 48, 48), labels="numbers"
    )
    assert_same_logits(checkpoint, loaded, f"jax {case}")


POSITIONS = "Transformer/posembed_input/pos_embedding"


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        (POSITIONS, (1, 0, 48), r"pos_embed has shape \[1, 0, 48\], expected"),
        (POSITIONS, (1, 1, 48), r"pos_embed has shape \[1, 1, 48\]: .* no square grid"),
        (POSITIONS, (1, 2, 48), None),  # the position after the class token is a grid of one
        ("Transformer/encoderblock_0/MlpBlock_3/Dense_1/kernel", (48,), r"fc2\.weight"),
    ],
)
def test_array_of_a_wrong_shape_is_refused(
    name: str, shape: tuple[int, ...], message: str | None, tmp_path: Path
) -> None:
    model = timm().create_model(
        "vit_tiny_patch16_224", img_size=16, depth=1, embed_dim=48, num_classes=2
    )
    file = tmp_path / "model.npz"
    np.savez(file, **(jax_arrays(model) | {name: np.zeros(shape, np.float32)}))
    options: dict[str, Any] = {"preprocess": preprocess_file(tmp_path, 16, 16), "labels": "numbers"}
    if message is None:
        assert load_checkpoint(str(file), **options).vit.grid == (1, 1)
    else:
        with pytest.raises(CheckpointError, match=message):
            load_checkpoint(str(file), **options)
