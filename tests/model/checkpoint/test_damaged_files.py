"""Weights that are missing, damaged, hostile or not where they should be are refused in one line."""

from __future__ import annotations

import json
import os
import pickle
import re
import struct
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from model.checkpoint import load_checkpoint, native
from model.checkpoint.checkpoint import Checkpoint
from tests.model.checkpoint.folders import CONFIG, FOLDERS, PREPROCESS, native_folder, refusal, tiny


@pytest.mark.parametrize("kind", FOLDERS)
@pytest.mark.parametrize("cut", [0, 1, 7, 8, 9, 100, 2000, -1])
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
    assert "refused, it is not plain tensors" in refusal(file, architecture="vit_tiny_patch16_224")
    file.write_bytes(pickle.dumps(_Evil()))
    refusal(file, architecture="vit_tiny_patch16_224")
    assert capsys.readouterr().out == ""


def test_a_file_of_more_than_tensors_is_told_to_save_the_weights_alone(tmp_path: Path) -> None:
    file = tmp_path / "weights.pt"
    torch.save(torch.nn.Linear(2, 2), file)
    message = refusal(file, architecture="vit_tiny_patch16_224")
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


@pytest.mark.parametrize(
    "content", [b"", b"abc", b"PK\x03\x04" + b"\0" * 50, b"\x80\x02}q\0.", b"\x80\x05" + b"\xff" * 30]
)
def test_a_damaged_pickle_is_refused(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "weights.pth"
    file.write_bytes(content)
    assert "weights.pth" in refusal(file, architecture="vit_tiny_patch16_224")


def test_a_pickle_that_is_no_state_dict_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "weights.pth"
    for value in ([torch.zeros(2)], {"a": 1}, torch.zeros(2), {}):
        torch.save(value, file)
        assert "weights.pth" in refusal(file, architecture="vit_tiny_patch16_224")


def test_a_pickle_that_unpacks_to_more_than_itself_is_refused(tmp_path: Path) -> None:
    file, packed = tmp_path / "plain.pth", tmp_path / "weights.pth"
    torch.save({"head.weight": torch.zeros(1000, 1000)}, file)
    with zipfile.ZipFile(file) as plain, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in plain.namelist():
            archive.writestr(name, plain.read(name))
    assert torch.load(packed, weights_only=True)["head.weight"].shape == (1000, 1000)
    assert "unpacks to 4000" in refusal(packed, architecture="vit_tiny_patch16_224")


def test_a_tensor_of_more_numbers_than_are_stored_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "weights.pth"
    torch.save({"head.weight": torch.zeros(1).expand(10**6, 10**4)}, file)
    assert "has shape [1000000, 10000], more than the file holds" in refusal(file, architecture="vit_tiny_patch16_224")


def test_weights_that_are_overwritten_while_they_serve_stay_as_they_were_read(tmp_path: Path) -> None:
    config = CONFIG.model_copy(update={"width": 128})
    checkpoint = Checkpoint("a", "a", "vitserve", "a", config, PREPROCESS, ("a", "b", "c"), tiny(config))
    native.write(tmp_path, checkpoint, dtype=torch.float32)
    model = load_checkpoint(str(tmp_path)).build()
    pid = os.fork()
    if pid == 0:
        try:
            os.truncate(tmp_path / "model.safetensors", 9)
            equal = all(torch.equal(one, checkpoint.tensors[name]) for name, one in model.state_dict().items())
            os._exit(0 if equal else 1)
        finally:
            os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0  # and not SIGBUS, which a mapped file that is cut gives


@pytest.mark.parametrize("content", [b"", b"abc", b"PK\x03\x04" + b"\0" * 50])
def test_a_damaged_npz_is_refused(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "weights.npz"
    file.write_bytes(content)
    assert "weights.npz" in refusal(file)


def test_an_npz_whose_header_unpacks_to_far_more_than_the_file_costs_nothing(tmp_path: Path) -> None:
    file = tmp_path / "weights.npz"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", b"\x93NUMPY\2\0" + struct.pack("<I", 32 << 20) + bytes(32 << 20))
    tracemalloc.start()
    try:
        assert "weights.npz" in refusal(file)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_an_npz_that_holds_objects_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.npz"
    arrays: dict[str, Any] = {"embedding/kernel": np.array([{"a": 1}], dtype=object)}
    np.savez(file, **arrays)
    assert "objects" in refusal(file)


def test_a_shard_outside_the_folder_is_refused(tmp_path: Path) -> None:
    folder = native_folder(tmp_path / "model")
    (folder / "model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    names = load_file(tmp_path / "elsewhere.safetensors")
    index = {"weight_map": dict.fromkeys(names, "../elsewhere.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "is not the name of a safetensors file beside it" in refusal(folder)


def test_an_index_that_its_shards_contradict_is_refused(tmp_path: Path) -> None:
    folder = native_folder(tmp_path)
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    names = load_file(folder / "part.safetensors")
    index = {"weight_map": dict.fromkeys([*names, "more"], "part.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "'more' is in the index or in the shards, but not in both" in refusal(folder)


def test_a_tensor_that_claims_more_than_the_file_holds_is_refused_before_it_is_allocated(tmp_path: Path) -> None:
    folder = native_folder(tmp_path)
    header = json.dumps({"head.bias": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    assert "not a valid safetensors file" in refusal(folder)
