"""Weights that are missing, damaged or hostile are refused in one line, and nothing in them is run."""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import re
import struct
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from model.checkpoint import load_checkpoint, native
from model.checkpoint.checkpoint import Checkpoint
from model.checkpoint.tensor_files import read_tensor_file
from model.errors import CheckpointError
from tests.model.checkpoint.folders import CONFIG, FOLDERS, PREPROCESS, native_folder, refusal, tiny

BASE = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4)


@pytest.mark.parametrize("zipped", [True, False])
def test_what_torch_saved_is_read_with_what_training_scripts_save_beside_it(zipped: bool, tmp_path: Path) -> None:
    held: dict[str, Any] = {
        "model": OrderedDict(
            view=BASE.transpose(0, 2), half=BASE.half(), brain=BASE.bfloat16(), empty=torch.zeros(0, 5)
        ),
        "args": argparse.Namespace(lr=0.1, out=Path("a")),
        "numbers": [np.float64(0.5), np.int64(3), np.float32(1), np.random.default_rng(0).random(3)],
        "text": ["ä", b"bytes", None, True, 2**70, (), {"a": {1, 2}}, torch.Size([1]), torch.device("cpu")],
    }
    torch.save(held, tmp_path / "a.pth", _use_new_zipfile_serialization=zipped)
    read = read_tensor_file(tmp_path / "a.pth")
    assert all(torch.equal(read["model"][name], tensor) for name, tensor in held["model"].items())
    assert read["numbers"][:3] == [0.5, 3, 1]
    assert read["args"].lr == 0.1


@pytest.mark.parametrize("kind", FOLDERS)
@pytest.mark.parametrize("cut", [0, 7, 9, 2000, -1])
def test_a_truncated_file_is_named(kind: str, cut: int, tmp_path: Path) -> None:
    folder = FOLDERS[kind](tmp_path)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:cut])
    assert "model.safetensors: not a valid safetensors file" in refusal(folder)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    folder = native_folder(tmp_path)
    (folder / "model.safetensors").unlink()
    assert "no weights (model.safetensors" in refusal(folder)


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("run!",))


def test_a_pickle_with_code_is_refused_and_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "weights.pth"
    torch.save({"head.weight": torch.zeros(2), "evil": _Evil()}, file)
    assert re.search(
        r"refused, it is not plain tensors: it holds the Python object [\w.]*print; no code", refusal(file)
    )
    file.write_bytes(pickle.dumps(_Evil()))
    refusal(file)
    assert capsys.readouterr().out == ""


def test_a_file_of_more_than_tensors_is_told_to_save_the_weights_alone(tmp_path: Path) -> None:
    file = tmp_path / "weights.pt"
    torch.save(torch.nn.Linear(2, 2), file)
    message = refusal(file)
    assert "it holds the Python object torch.nn.modules.linear.Linear" in message
    assert "torch.save(model.state_dict(), FILE), or convert" in message
    # What torch itself advises is to switch its safety off.
    assert not re.search("weights_only|safe_globals|trust", message)


def test_a_pickled_model_of_transformers_is_told_to_save_a_folder(tmp_path: Path) -> None:
    file = tmp_path / "model.bin"
    file.write_bytes(b"\x80\x02ctransformers.models.vit.modeling_vit\nViTForImageClassification\n)\x81.")
    message = refusal(file)
    assert "it holds the Python object transformers.models.vit.modeling_vit.ViTForImageClassification" in message
    assert "model.save_pretrained(FOLDER)" in message
    assert "state_dict" not in message


@pytest.mark.parametrize("value", [[torch.zeros(2)], {"a": 1}, torch.zeros(2), {}])
def test_a_pickle_that_is_no_state_dict_is_refused(value: Any, tmp_path: Path) -> None:
    torch.save(value, tmp_path / "weights.pth")
    assert "expected a state dict of tensors" in refusal(tmp_path / "weights.pth")


def test_an_npz_that_holds_objects_is_refused(tmp_path: Path) -> None:
    arrays: dict[str, Any] = {"embedding/kernel": np.array([{"a": 1}], dtype=object)}
    np.savez(tmp_path / "model.npz", **arrays)
    assert "not a valid .npz file, or damaged, or it holds more than arrays" in refusal(tmp_path / "model.npz")


def test_weights_that_are_overwritten_while_they_serve_stay_as_they_were_read(tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"width": 128})
    checkpoint = Checkpoint("a", "a", "vitserve", "a", config, PREPROCESS, ("a", "b", "c"), tiny(config))
    native.write(tmp_path, checkpoint, dtype=torch.float32)
    model = load_checkpoint(str(tmp_path)).build()
    os.truncate(tmp_path / "model.safetensors", 9)  # SIGBUS, where a file is mapped
    assert all(torch.equal(one, checkpoint.tensors[name]) for name, one in model.state_dict().items())


def test_an_index_that_its_shards_contradict_or_that_leads_outside_is_refused(tmp_path: Path) -> None:
    folder = native_folder(tmp_path)
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    names = load_file(folder / "part.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys([*names, "more"], "part.safetensors")}))
    assert "'more' is in the index or in the shards, but not in both" in refusal(folder)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(names, "../part.safetensors")}))
    assert "is not the name of a safetensors file beside it" in refusal(folder)


def test_a_tensor_that_claims_more_than_the_file_holds_is_refused(tmp_path: Path) -> None:
    folder = native_folder(tmp_path)
    header = json.dumps({"head.bias": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    assert "not a valid safetensors file" in refusal(folder)


def _files() -> dict[str, bytes]:
    folded, packed = io.BytesIO(), io.BytesIO()
    torch.save({"state_dict": tiny(), "evil": [1, "a", np.float64(2)]}, folded)
    arrays: dict[str, Any] = {name: tensor.numpy() for name, tensor in tiny().items()}
    np.savez_compressed(packed, **arrays)
    old = io.BytesIO()
    torch.save(tiny(), old, _use_new_zipfile_serialization=False)
    plain = safetensors.torch.save(tiny())
    return {".safetensors": plain, ".pth": folded.getvalue(), ".bin": old.getvalue(), ".npz": packed.getvalue()}


FILES = _files()
PYTHON = re.compile(r"Error\b|from empty|has no attr|NoneType|iterable|indices must|[Aa]rgument|unpack|pickle")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("suffix", FILES)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_is_a_refusal_in_one_line_or_does_no_harm(suffix: str, data: st.DataObject, tmp_path: Path) -> None:
    damaged = bytearray(FILES[suffix])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(
            st.integers(0, len(damaged) - 1) | st.integers(0, 300) | st.integers(len(damaged) - 600, len(damaged) - 1)
        )
        damaged[at % len(damaged)] = data.draw(st.integers(0, 255))
    file = tmp_path / f"weights{suffix}"
    file.write_bytes(damaged[: data.draw(st.just(len(damaged)) | st.integers(0, len(damaged)))])
    try:
        load_checkpoint(str(file), architecture="vit_tiny_patch16_224")
    except CheckpointError as error:
        assert "\n" not in str(error)
        assert not PYTHON.search(str(error))
