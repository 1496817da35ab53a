"""Any change to a file of a checkpoint is a refusal in one line, or a model that computes what its config says."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from model.checkpoint import load_checkpoint
from model.errors import CheckpointError
from tests.model.checkpoint.folders import FOLDERS, native_folder

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


def right_or_refused(folder: Path) -> None:
    """Either a refusal in one line, or a model that computes what its config says."""
    try:
        checkpoint = load_checkpoint(str(folder))
        model = checkpoint.build()
    except CheckpointError as error:
        assert "\n" not in str(error)
        return
    config = checkpoint.config
    with torch.inference_mode():
        logits = model(torch.zeros(1, config.in_channels, *config.image_size)).logits
    assert logits.shape == (1, len(checkpoint.labels))


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
    folder = FOLDERS[kind](tmp_path / "model") if not (tmp_path / "model").exists() else tmp_path / "model"
    original = tmp_path / "original.json"
    if not original.exists():
        original.write_text((folder / file).read_text())
    config = json.loads(original.read_text())
    for _ in range(data.draw(st.integers(1, 2))):
        *parents, last = data.draw(st.sampled_from(paths(config)))
        inside = config
        for key in parents:
            inside = inside[key]
        if isinstance(inside, dict) and data.draw(st.booleans()):
            del inside[last]
            break
        inside[last] = data.draw(JSON)
        break
    (folder / file).write_text(json.dumps(config))
    right_or_refused(folder)


@FUZZ
@given(data=st.data())
def test_any_change_to_a_safetensors_header_is_a_refusal_or_a_right_model(data: st.DataObject, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    if not folder.exists():
        native_folder(folder)
        (tmp_path / "original").write_bytes((folder / "model.safetensors").read_bytes())
    original = (tmp_path / "original").read_bytes()
    length = struct.unpack("<Q", original[:8])[0]
    if data.draw(st.booleans()):
        header = json.loads(original[8 : 8 + length])
        *parents, last = data.draw(st.sampled_from(paths(header)))
        inside = header
        for key in parents:
            inside = inside[key]
        inside[last] = data.draw(
            JSON | st.sampled_from(["F16", "F64", "I8", "BOOL", "BF16", "F8_E4M3", "U64", [2**62, 2**62]])
        )
        text = json.dumps(header).encode()
        changed = struct.pack("<Q", data.draw(st.just(len(text)) | st.integers(0, 2**64 - 1))) + text
        changed += original[8 + length :]
    else:
        at = data.draw(st.integers(0, 8 + length - 1))
        changed = original[:at] + bytes([data.draw(st.integers(0, 255))]) + original[at + 1 :]
    (folder / "model.safetensors").write_bytes(changed)
    right_or_refused(folder)
