"""A key map reads a state dict with names of its own."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model.errors import CheckpointError
from model.extensions.formats.key_map import mapped, read_key_map
from tests.extensions.formats.home_made import PLAIN, load, made
from tests.model.checkpoint.parity import (
    assert_same_logits,
)

SMALL = {"depth": 2, "embed_dim": 48, "num_heads": 3}


MAP = """
[[tensor]]
from = ["layers.{}.q.weight", "layers.{}.k.weight", "layers.{}.v.weight"]
to = "blocks.{}.attn.qkv.weight"
[[tensor]]
from = ["layers.{}.q.bias", "layers.{}.k.bias", "layers.{}.v.bias"]
to = "blocks.{}.attn.qkv.bias"
[[tensor]]
from = "layers.{}.mix.weight"
to = "blocks.{}.attn.proj.weight"
transpose = true
[[tensor]]
from = "layers.{}.mix.bias"
to = "blocks.{}.attn.proj.bias"
[[tensor]]
from = "layers.{}.clock"
to = ""
"""


def with_names_of_its_own(state: dict[str, Tensor]) -> dict[str, Tensor]:
    result: dict[str, Tensor] = {}
    for name, tensor in state.items():
        mine = re.sub(r"blocks\.(\d)\.attn\.proj", r"layers.\1.mix", name)
        if ".qkv." in name:
            parts = zip("qkv", tensor.chunk(3), strict=True)
            result |= {
                re.sub(r"blocks\.(\d)\.attn\.qkv", rf"layers.\1.{part}", name): rows
                for part, rows in parts
            }
        else:
            result[mine] = tensor.T if mine.endswith("mix.weight") else tensor
    return result | {f"layers.{i}.clock": torch.ones(3) for i in range(2)}


def test_a_map_makes_an_odd_file_exact(tmp_path: Path) -> None:
    model = made(hidden=48)
    keys = tmp_path / "map.toml"
    keys.write_text(MAP)
    state = with_names_of_its_own(dict(model.state_dict()))
    with pytest.raises(
        CheckpointError, match=r"such as 'cls_token'.*: a file of VIT_KEYS says which tensor"
    ):
        load(state, tmp_path, PLAIN)
    assert_same_logits(load(state, tmp_path, PLAIN, keys=str(keys)), model, "a map of names")


def test_a_renamed_projection_needs_an_order(tmp_path: Path) -> None:
    model = made(heads=4, qkv_order="h3d")
    keys = tmp_path / "map.toml"
    given = PLAIN.replace("num_heads=3", "num_heads=4")
    entries = [
        f'[[tensor]]\nfrom = "blocks.{{}}.look.{k}"\nto = "blocks.{{}}.attn.qkv.{k}"'
        for k in ("weight", "bias")
    ]
    keys.write_text("\n".join(entries))
    state = {
        name.replace("attn.qkv", "look"): tensor for name, tensor in model.state_dict().items()
    }
    with pytest.raises(CheckpointError, match=r"no file says its qkv_order: .*qkv_order=3hd"):
        load(state, tmp_path, given, keys=str(keys))
    assert_same_logits(
        load(state, tmp_path, f"{given},qkv_order=h3d", keys=str(keys)), model, "h3d"
    )
    with pytest.raises(CheckpointError, match="qkv_order 'hhd': expected one of"):
        load(state, tmp_path, f"{given},qkv_order=hhd", keys=str(keys))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense", "not TOML"),
        ("[[tensor]]", "tensor.0.from"),
        ('[[tensor]]\nfrom = "b"\nto = "x"\nother = 1', "other"),
        (
            '[[tensor]]\nfrom = "a.*"\nto = "x"',
            r"'a\.\*': no tensor of this name is left: did you mean 'a.[01]'",
        ),
        (
            '[[tensor]]\nfrom = "nothing"\nto = "x"',
            r"'nothing': no tensor of this name is left: \{\} stands for the number of a block",
        ),
        ('[[tensor]]\nfrom = ["a.0", "z"]\nto = "x"', "'z': no tensor of this name is left"),
        ('[[tensor]]\nfrom = "a.{}"\nto = "x"', "two tensors are called 'x'"),
        ('[[tensor]]\nfrom = "b"\nto = "a.0"', "two tensors are called 'a.0'"),
        ('[[tensor]]\nfrom = ["a.0", "b"]\nto = "x"', "cannot be joined"),
    ],
)
def test_a_map_that_does_not_fit_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "map.toml").write_text(text)
    tensors: dict[str, Any] = {
        "a.0": torch.ones(2, 3),
        "a.1": torch.ones(2, 3),
        "b": torch.zeros(3),
    }
    with pytest.raises(CheckpointError, match=message):
        mapped(tensors, read_key_map(str(tmp_path / "map.toml")))
