"""Any change to a file of a checkpoint is a refusal in one line, or a model that computes what its config says."""

from __future__ import annotations

import io
import json
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from model.checkpoint import load_checkpoint
from model.errors import CheckpointError
from tests.model.checkpoint.folders import FOLDERS, edit, native_folder, tiny

pytestmark = pytest.mark.timeout(120)  # hundreds of checkpoints are loaded

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([0, 1, -1, 2, 16, 10**18, 10**400, "\x1b", "gelu", "vit", [16, 16], [3, 16, 16], float("nan")]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=6,
)


def paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value."""
    found = [at] if at else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += paths(inner, (*at, key))
    return found


FUZZ = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


PYTHON = re.compile(r"Error\b|from empty|has no attr|NoneType|iterable|indices must|unpack|pickle")


def right_or_refused(source: Path, **options: Any) -> None:
    """Either a refusal in one line, or a model that computes what its config says."""
    try:
        checkpoint = load_checkpoint(str(source), **options)
        model = checkpoint.build()
    except CheckpointError as error:
        assert "\n" not in str(error)
        assert not PYTHON.search(str(error)), "no words of Python's"
        return
    config = checkpoint.config
    with torch.inference_mode():
        logits = model(torch.zeros(1, config.in_channels, *config.image_size)).logits
    assert logits.shape == (1, len(checkpoint.labels))


def changed(document: Any, data: st.DataObject, values: st.SearchStrategy[Any]) -> Any:
    """The JSON value with one place removed or another value put there."""
    *parents, last = data.draw(st.sampled_from(paths(document)))
    inside = document
    for key in parents:
        inside = inside[key]
    inside[last] = data.draw(values)
    if isinstance(inside, dict) and data.draw(st.booleans()):
        del inside[last]
    return document


@pytest.mark.parametrize(
    ("kind", "file"),
    [
        ("native", "config.json"),
        ("timm", "config.json"),
        ("huggingface", "config.json"),
        ("huggingface", "preprocessor_config.json"),
    ],
)
@FUZZ
@given(data=st.data())
def test_any_change_to_a_config_is_a_refusal_or_a_right_model(
    kind: str, file: str, data: st.DataObject, tmp_path: Path
) -> None:
    folder = FOLDERS[kind](tmp_path / "model")
    edit(folder / file, lambda config: changed(config, data, JSON))
    right_or_refused(folder)


@FUZZ
@given(data=st.data())
def test_any_change_to_a_safetensors_header_is_a_refusal_or_a_right_model(data: st.DataObject, tmp_path: Path) -> None:
    weights = native_folder(tmp_path / "model") / "model.safetensors"
    whole = weights.read_bytes()
    length = struct.unpack("<Q", whole[:8])[0]
    types = st.sampled_from(["F16", "F64", "I8", "BOOL", "BF16", "F8_E4M3", "U64", [2**62, 2**62]])
    text = json.dumps(changed(json.loads(whole[8 : 8 + length]), data, JSON | types)).encode()
    size = struct.pack("<Q", data.draw(st.just(len(text)) | st.integers(0, 2**64 - 1)))
    weights.write_bytes(size + text + whole[8 + length :])
    right_or_refused(weights.parent)


def _files() -> dict[str, bytes]:
    zipped, old, packed = io.BytesIO(), io.BytesIO(), io.BytesIO()
    torch.save({"state_dict": tiny(), "evil": [1, "a", np.float64(2)]}, zipped)
    torch.save(tiny(), old, _use_new_zipfile_serialization=False)
    arrays: dict[str, Any] = {name: tensor.numpy() for name, tensor in tiny().items()}
    np.savez_compressed(packed, **arrays)
    return {".pth": zipped.getvalue(), ".bin": old.getvalue(), ".npz": packed.getvalue(), ".safetensors": save(tiny())}


FILES = _files()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("suffix", FILES)
@FUZZ
@given(data=st.data())
def test_any_damage_to_a_file_is_a_refusal_in_one_line_or_does_no_harm(
    suffix: str, data: st.DataObject, tmp_path: Path
) -> None:
    damaged = bytearray(FILES[suffix])
    last = len(damaged) - 1
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, last) | st.integers(0, 300) | st.integers(last - 600, last))
        damaged[at % len(damaged)] = data.draw(st.integers(0, 255))
    file = tmp_path / f"weights{suffix}"
    file.write_bytes(damaged[: data.draw(st.just(last + 1) | st.integers(0, last))])
    right_or_refused(file, architecture="vit_tiny_patch16_224")
