"""Binary tensors of the Open Inference Protocol: what comes back is what was sent, and damage is refused as such."""

from __future__ import annotations

import base64
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.errors import MalformedRequest
from service.web.inference_protocol.tensors import InputTensor, OutputTensor


def raw(files: list[bytes]) -> bytes:
    return b"".join(struct.pack("<I", len(file)) + file for file in files)


def read(count: int, data: object) -> list[bytearray]:
    return InputTensor("image", "BYTES", [count], data).files()


@given(st.lists(st.binary(max_size=40), max_size=5), st.integers(0, 220), st.binary(max_size=6))
def test_files_come_back_and_damaged_lengths_are_refused(files: list[bytes], cut: int, more: bytes) -> None:
    assert read(len(files), memoryview(raw(files))) == files
    assert read(len(files), [base64.b64encode(file).decode() for file in files]) == files
    damaged = raw(files)[:cut] + more
    try:
        found = read(len(files), memoryview(damaged))
    except MalformedRequest:
        return
    assert raw([bytes(file) for file in found]) == damaged


@given(st.lists(st.text(max_size=9), min_size=1, max_size=5))
def test_texts_of_an_answer_are_read_as_they_were_written(texts: list[str]) -> None:
    sent = OutputTensor("label", np.array(texts, object), binary=True).raw()
    assert [file.decode() for file in read(len(texts), memoryview(sent))] == texts


def test_long_base64_is_read_in_pieces_and_elements_beyond_the_shape_are_not_collected() -> None:
    data = bytes(range(256)) * 4096
    assert read(1, [base64.b64encode(data).decode()]) == [data]
    for wrong in ("=" * 4 + "A" * (1 << 20), "A" * (1 << 20) + "*", "A" * ((1 << 20) - 1) + "=" + "A" * 4):
        with pytest.raises(MalformedRequest, match="element 0 is not a string in base64"):
            read(1, [wrong])
    with pytest.raises(MalformedRequest, match="4 elements, and the shape is"):
        read(3, memoryview(bytes(4 * 2_000_000)))
