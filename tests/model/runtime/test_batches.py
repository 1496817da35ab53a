"""Batches on the CPU: their pieces, memory for the next batch, and the tolerance of answers."""

import ctypes
import subprocess
import sys

import numpy as np
import pytest

from model.errors import DeviceError
from model.runtime import cpu
from model.runtime.backend import HostOutputs
from model.runtime.batch_sizes import compute_in_pieces
from model.runtime.trial import require_close


@pytest.mark.parametrize("layers", [0, 2])
def test_outputs_of_pieces_keep_their_order(layers: int) -> None:
    images = np.arange(19, dtype=np.uint8).reshape(19, 1, 1, 1)
    seen: list[int] = []

    def compute(piece: np.ndarray) -> HostOutputs:
        seen.append(len(piece))
        logits = piece.reshape(-1, 1).astype(np.float32)
        rows = np.broadcast_to(logits.reshape(-1, 1, 1, 1), (len(piece), layers, 3, 4))
        return {"logits": logits, "attention": rows} if layers else {"logits": logits}

    output = compute_in_pieces(images, compute)
    assert seen == [8, 8, 2, 1]
    assert output["logits"][:, 0].tolist() == list(range(19))
    if layers:
        assert output["attention"].shape == (19, 2, 3, 4)
        assert output["attention"][:, 1, 2, 3].tolist() == list(range(19))
    else:
        assert "attention" not in output


def outputs() -> HostOutputs:
    """Return outputs of 64 images; the last image's logits and relevance are 100 times smaller."""
    random = np.random.default_rng(0)
    sizes = np.r_[np.ones(63), 0.01].astype(np.float32)
    attention = random.random((64, 1, 3, 10), np.float32)
    logits, relevance = (
        sizes[:, None] * random.normal(size=(64, 20)).astype(np.float32) for _ in range(2)
    )
    return {
        "logits": logits,
        "attention": attention / attention.sum(axis=-1, keepdims=True),
        "relevance": relevance,
    }


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", ["logits", "attention", "relevance"])
@pytest.mark.parametrize("image", [0, 40, 63])
def test_one_image_of_zeros_is_refused(name: str, image: int, exact: bool) -> None:
    expected = outputs()
    spoilt = expected[name].copy()
    spoilt[image] = 0
    with pytest.raises(DeviceError, match=f"OpenVINO's {name} of an image are"):
        require_close(expected | {name: spoilt}, expected, exact=exact, source="OpenVINO")


def test_rounding_is_not() -> None:
    expected = outputs()
    rounded = {name: value * np.float32(1.005) for name, value in expected.items()}
    require_close(rounded, expected, exact=False, source="OpenVINO")


def test_only_equal_classes_are_compared() -> None:
    logits = np.array([np.arange(20.0), np.arange(20.0)], np.float32)
    relevance = np.ones((2, 10), np.float32)
    expected = {"logits": logits, "relevance": relevance}
    other = logits.copy()
    other[0, [18, 19]] = 18.5 + np.array([0.01, 0])
    other[1, [8, 9]] = 8.5 + np.array([0.01, 0])
    negated = {"logits": other, "relevance": -relevance}
    require_close(negated, expected, exact=False, source="OpenVINO")
    other[1, [8, 9]] = 8.5 - np.array([0.01, 0])  # its margin has the same classes
    with pytest.raises(DeviceError, match="relevance"):
        require_close(negated, expected, exact=False, source="OpenVINO")


FAULTS_OF_A_PASS = """
import ctypes, resource, sys
from model.runtime.cpu import keep_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
if sys.argv[1] == "keep":
    assert keep_freed_memory()


def one_pass():
    blocks = [libc.malloc(2**23) for _ in range(4)]  # 8 MiB each, which are there at the same time
    for block in blocks:
        libc.memset(block, 1, 2**23)
    for block in blocks:
        libc.free(block)


for _ in range(3):
    one_pass()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    one_pass()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 5)
"""


def faults(mode: str) -> int:
    command = [sys.executable, "-c", FAULTS_OF_A_PASS, mode]
    return int(
        subprocess.run(command, capture_output=True, text=True, timeout=50, check=True).stdout
    )


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc")
def test_a_pass_needs_no_cleared_pages() -> None:
    assert faults("as it is") > 1000, "what is mended"
    assert faults("keep") < 100


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MALLOC_TRIM_THRESHOLD_", "131072"),
        ("MALLOC_MMAP_THRESHOLD_", "131072"),
        ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=131072"),
    ],
)
def test_thresholds_of_the_environment_hold(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: pytest.fail("glibc is told others"))
    assert not cpu.keep_freed_memory()
