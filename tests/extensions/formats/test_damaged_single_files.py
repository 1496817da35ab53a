import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from tests.model.checkpoint.folders import refusal, tiny
from tests.model.checkpoint.fuzzing import FUZZ, TIMEOUT_SECONDS, right_or_refused

pytestmark = pytest.mark.timeout(TIMEOUT_SECONDS)


def test_what_is_no_state_dict_is_refused(tmp_path: Path) -> None:
    for value in ([torch.zeros(2)], {"a": 1}, torch.zeros(2), {}):
        torch.save(value, tmp_path / "weights.pth")
        assert "expected a state dict of tensors" in refusal(tmp_path / "weights.pth")
    arrays: dict[str, Any] = {"embedding/kernel": np.array([{"a": 1}], dtype=object)}
    np.savez(tmp_path / "model.npz", **arrays)
    assert "not a valid .npz file, or damaged, or it holds more than arrays" in refusal(
        tmp_path / "model.npz"
    )


def test_a_damaged_compression_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "weights.npz"
    np.savez_compressed(file, weight=np.arange(999.0))
    damaged = bytearray(file.read_bytes())
    damaged[100:400] = b"\xff" * 300
    file.write_bytes(damaged)
    assert "not a valid .npz file, or damaged" in refusal(file)


def _files() -> dict[str, bytes]:
    zipped = io.BytesIO()
    old = io.BytesIO()
    packed = io.BytesIO()
    torch.save({"state_dict": tiny(), "evil": [1, "a", np.float64(2)]}, zipped)
    torch.save(tiny(), old, _use_new_zipfile_serialization=False)
    arrays: dict[str, Any] = {name: tensor.numpy() for name, tensor in tiny().items()}
    np.savez_compressed(packed, **arrays)
    return {
        ".pth": zipped.getvalue(),
        ".bin": old.getvalue(),
        ".npz": packed.getvalue(),
        ".safetensors": save(tiny()),
    }


FILES = _files()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("suffix", FILES)
@FUZZ
@given(data=st.data())
def test_damaged_file_is_refused_or_right(suffix: str, data: st.DataObject, tmp_path: Path) -> None:
    damaged = bytearray(FILES[suffix])
    last = len(damaged) - 1
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, last) | st.integers(0, 300) | st.integers(last - 600, last))
        damaged[at % len(damaged)] = data.draw(st.integers(0, 255))
    file = tmp_path / f"weights{suffix}"
    file.write_bytes(damaged[: data.draw(st.just(last + 1) | st.integers(0, last))])
    right_or_refused(file, architecture="vit_tiny_patch16_224")
