"""What `torch.save` writes is read as torch reads it, in every form that it has had; what is no data is refused."""

from __future__ import annotations

import argparse
import collections
import pathlib
import pickle
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from model.checkpoint.tensor_files.pickles import Unread, read_pickle
from model.errors import CheckpointError

KINDS = "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool complex64"
BASE = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4)
VALUES: dict[str, Any] = {
    "kinds": {kind: BASE.to(getattr(torch, kind)) for kind in KINDS.split()},
    "new kinds": {"a": BASE.to(torch.float8_e4m3fn), "b": BASE.to(torch.uint16)},
    "views": {"t": BASE.transpose(0, 2), "slice": BASE[1, ::2, 1:3], "whole": BASE, "last": BASE[-1, -1]},
    "sizes": {"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 5), "none": torch.zeros(2, 0)},
    "parameters": nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).state_dict(keep_vars=True),
    "training": {
        "state_dict": collections.OrderedDict(a=BASE),
        "optimizer": {
            "state": {0: {"step": torch.tensor(3.0), "exp_avg": BASE}},
            "param_groups": [{"betas": (0.9, 1)}],
        },
        "text": ["ä", b"bytes", None, True, 2**70, -1, 1.5, (), [], {}],
    },
}


def assert_same(read: Any, expected: Any) -> None:
    if isinstance(expected, Tensor):
        assert read.dtype == expected.dtype
        assert read.shape == expected.shape
        assert torch.equal(read.to(torch.complex64), expected.to(torch.complex64))
    elif isinstance(expected, dict):
        assert read.keys() == expected.keys()
        for key, value in expected.items():
            assert_same(read[key], value)
    elif isinstance(expected, list | tuple):
        assert type(read) is type(expected)
        for one, other in zip(read, expected, strict=True):
            assert_same(one, other)
    elif not isinstance(expected, bytes):  # which are made by a function at protocol 2, and in no way needed
        assert read == expected


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_file_of_torch_is_read_as_torch_reads_it(value: str, zipped: bool, protocol: int, tmp_path: Path) -> None:
    file = tmp_path / "a.pth"
    if value == "new kinds" and not zipped:
        return  # torch itself cannot read what it writes so
    torch.save(VALUES[value], file, pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
    assert_same(read_pickle(file), VALUES[value])
    assert_same(read_pickle(file), torch.load(file, weights_only=False))


def test_what_training_scripts_save_beside_tensors_is_left_unread(tmp_path: Path) -> None:
    beside = {
        "args": argparse.Namespace(lr=0.1, out=pathlib.PosixPath("a")),
        "number": np.float64(0.5),
        "random": np.random.default_rng(0).random(3),
        "size": torch.Size([1, 2]),
        "device": torch.device("cpu"),
        "set": {1, 2},
        "count": collections.Counter("aab"),
        "grouped": collections.defaultdict(list, a=[1]),
        "complex": 1j,
        "array": bytearray(b"abc"),
    }
    held: dict[Any, Any] = {"model": {"a": BASE}, **beside, (1, 2): 3, 2**200: 4}
    torch.save(held, tmp_path / "a.pth")
    read = read_pickle(tmp_path / "a.pth")
    assert torch.equal(read["model"]["a"], BASE)
    assert {type(read[key]) for key in beside if key != "grouped"} == {Unread}
    assert read["grouped"] == {"a": [1]}
    assert sum(isinstance(key, Unread) for key in read) == 2


class _Own(Tensor):
    pass


@pytest.mark.parametrize("value", [torch.float32, nn.Linear(2, 2), print, {"a": _Own()}, pickle.PickleBuffer])
def test_what_is_no_data_is_refused(value: Any, tmp_path: Path) -> None:
    torch.save({"a": BASE, "b": value}, tmp_path / "a.pth")
    if value is torch.float32:
        assert read_pickle(tmp_path / "a.pth")["b"] is torch.float32
        return
    with pytest.raises(CheckpointError, match="refused, it is not plain tensors: it holds the Python object"):
        read_pickle(tmp_path / "a.pth")


@pytest.mark.parametrize(
    "steps",
    [
        b"cargparse\nNamespace\n(N}X\1\0\0\0aK\1stb.",  # an attribute of a class
        b"ccollections\nOrderedDict\n}X\1\0\0\0aK\1sb.",  # or of a function
        b"X\1\0\0\0a)\x81.",  # new objects of what is no class
        b"X\1\0\0\0a)R.",  # and calls of what is no function
        b"ctorch\nfloat32\n)R.",
        b"(ibuiltins\nset\n.",
        b"\x82\1.",
        b"]X\1\0\0\0aK\1s.",
    ],
)
def test_steps_that_change_or_make_objects_are_refused(steps: bytes, tmp_path: Path) -> None:
    parts: list[Any] = [0x1950A86A20F9469CFC6C, 1001, {}]
    head = b"".join(pickle.dumps(part, 2) for part in parts)
    (tmp_path / "a.pth").write_bytes(head + b"\x80\2" + steps + pickle.dumps([], 2))
    with pytest.raises(CheckpointError, match="not a file that torch"):
        read_pickle(tmp_path / "a.pth")
    assert not hasattr(argparse.Namespace, "a")


def test_a_length_that_is_only_claimed_takes_no_memory(tmp_path: Path) -> None:
    parts: list[Any] = [0x1950A86A20F9469CFC6C, 1001, {}]
    head = b"".join(pickle.dumps(part, 2) for part in parts)
    (tmp_path / "a.pth").write_bytes(head + b"\x80\5" + pickle.BYTEARRAY8 + struct.pack("<Q", 64 << 20) + b".")
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match="not a file that torch"):
            read_pickle(tmp_path / "a.pth")
        assert tracemalloc.get_traced_memory()[1] < 40 << 20
    finally:
        tracemalloc.stop()
