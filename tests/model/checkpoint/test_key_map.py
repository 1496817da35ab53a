"""A map of names is drafted from a file, finished by its maker, and applied wherever the file is read."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model.checkpoint.state_dicts.key_map import draft, mapped
from model.errors import CheckpointError
from tests.model.checkpoint.home_made import PLAIN, load, made
from tests.model.checkpoint.parity import assert_same_logits
from tests.model.checkpoint.test_home_made_names import apart, renamed

RULES = (
    (r"blocks\.(\d)\.norm1", r"layers.\1.a"),
    (r"blocks\.(\d)\.norm2", r"layers.\1.b"),
    (r"blocks\.(\d)\.attn\.proj", r"layers.\1.mix"),
    (r"blocks\.(\d)\.attn", r"layers.\1.look"),
    (r"blocks\.(\d)\.mlp\.fc1", r"layers.\1.mlp.0"),
    (r"blocks\.(\d)\.mlp\.fc2", r"layers.\1.mlp.2"),
    ("^norm", "last"),
)


def test_a_finished_draft_makes_an_odd_file_exact(tmp_path: Path) -> None:
    model = made(hidden=48)
    state = apart(renamed(dict(model.state_dict()), *RULES), "q", "k", "v")
    state["layers.0.mix.weight"], state["layers.1.mix.weight"] = (state[f"layers.{i}.mix.weight"].T for i in range(2))
    state["layers.0.clock"] = state["layers.1.clock"] = torch.ones(3)
    with pytest.raises(CheckpointError, match=r"inspect FILE --keys draft\.toml"):
        load(state, tmp_path, PLAIN)
    text = draft(state)
    tomllib.loads(text)
    keys = tmp_path / "map.toml"
    keys.write_text(text)
    with pytest.raises(CheckpointError, match=r"map\.toml: 'layers\.\{\}\.\w+.*': say in place of '\?' what it is"):
        load(state, tmp_path, PLAIN, keys=str(keys))
    said = {
        "layers.{}.a": "blocks.{}.norm1", "layers.{}.b": "blocks.{}.norm2", "layers.{}.mix": "blocks.{}.attn.proj",
        "last": "norm",
    }  # fmt: skip
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if line == 'to = "?"':
            name = lines[number - 1].split('"')[1]
            module, _, kind = name.rpartition(".")
            lines[number] = f'to = "{said[module]}.{kind}"' if module in said else 'to = ""'
            if name == "layers.{}.mix.weight":
                lines[number] += "\ntranspose = true"
    keys.write_text("\n".join(lines))
    assert_same_logits(load(state, tmp_path, PLAIN, keys=str(keys)), model, "a map of names")


def test_a_draft_of_names_that_say_enough_is_finished(tmp_path: Path) -> None:
    model = made()
    state = renamed(dict(model.state_dict()), ("blocks", "layers"), ("qkv", "in_proj"), (r"attn\.proj", "attn.out"))
    keys = tmp_path / "map.toml"
    keys.write_text(draft(state))
    assert "?" not in keys.read_text()
    with pytest.raises(CheckpointError, match="no file says its qkv_order: "):
        load(state, tmp_path, PLAIN, keys=str(keys))
    checkpoint = load(state, tmp_path, f"{PLAIN},qkv_order=3hd", keys=str(keys))
    assert_same_logits(checkpoint, model, "a draft as it is")


TENSORS: dict[str, Tensor] = {
    "a.0": torch.arange(6.0).reshape(2, 3),
    "a.1": torch.ones(2, 3),
    "b": torch.zeros(3),
    "c.0": torch.ones(1, 3),
    "c.1": torch.zeros(1, 3),
}


def applied(entries: str, folder: Path) -> dict[str, Any]:
    (folder / "map.toml").write_text(entries)
    return {name: tensor.tolist() for name, tensor in mapped(TENSORS, str(folder / "map.toml")).items()}


def test_tensors_are_joined_split_turned_and_left_aside(tmp_path: Path) -> None:
    text = """
        [[tensor]]
        from = ["a.{}", "c.{}"]
        to = "d.{}"
        [[tensor]]
        from = "b"
        to = ["x", "y", "z"]
    """
    result = applied(text, tmp_path)
    assert result.keys() == {"d.0", "d.1", "x", "y", "z"}
    assert result["d.0"] == [[0, 1, 2], [3, 4, 5], [1, 1, 1]]
    turned = applied('[[tensor]]\nfrom = "a.0"\nto = "t"\ntranspose = true\n[[tensor]]\nfrom = "b"\nto = ""', tmp_path)
    assert turned["t"] == [[0, 3], [1, 4], [2, 5]]
    assert turned.keys() == {"t", "a.1", "c.0", "c.1"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "tensor"),
        ("[[tensor]]", "tensor.0.from"),
        ("nonsense", "not TOML"),
        ('[[tensor]]\nfrom = "b"\nto = "x"\nother = 1', "other"),
        ('[[tensor]]\nfrom = "nothing"\nto = "x"', "'nothing': no tensor of this name is left"),
        ('[[tensor]]\nfrom = ["a.0", "z"]\nto = "x"', "'z': no tensor of this name is left"),
        ('[[tensor]]\nfrom = "a.{}"\nto = "x"', "two tensors are called 'x'"),
        ('[[tensor]]\nfrom = "b"\nto = "a.0"', "two tensors are called 'a.0'"),
        ('[[tensor]]\nfrom = "b"\nto = ["x", "y"]', "'b' has 3 rows, which are not 2 parts"),
        ('[[tensor]]\nfrom = ["a.0", "b"]\nto = "x"', "cannot be joined"),
        ('[[tensor]]\nfrom = "b"\nto = "x"\ntranspose = true', "'b' is no matrix"),
    ],
)
def test_a_map_that_does_not_fit_is_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        applied(text, tmp_path)
