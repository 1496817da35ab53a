"""Batches on their way to a device and back, on a stand-in that every machine has."""

import itertools
import threading
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from model.errors import DeviceError
from model.runtime.batch_request import BatchRequest
from model.runtime.cuda.batch_launcher import BatchLauncher, CaptureFailed
from model.runtime.cuda.ops import CudaOps
from tests.model.runtime.cuda.device_stand_in import StandInOps

SHAPE = (2, 3, 1)
FAULTY = 255


class Sums:
    """A computation that answers each image with the sum of its bytes; fails on `FAULTY`.

    Each requested layer adds 1000. Logits are half of that, and the number of images.
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.at_once = 0
        self._inside = threading.Lock()

    def __call__(self, pixels: Tensor, request: BatchRequest) -> dict[str, Tensor]:
        if not self._inside.acquire(blocking=False):
            self.at_once += 1
            raise AssertionError("two batches compute at once")
        try:
            if (pixels == FAULTY).any():
                raise RuntimeError("a fault of the device")
            self.sizes.append(len(pixels))
            sums = pixels.flatten(1).int().sum(dim=1, keepdim=True, dtype=torch.int32)
            scores = (sums + 1000 * len(request.layers)).expand(-1, request.top_k).contiguous()
            logits = torch.cat(
                (scores[:, :1] / 2, torch.full((len(pixels), 1), len(pixels))), dim=1
            )
            return {"scores": scores, "logits": logits}
        finally:
            self._inside.release()


def computed(scores: Tensor) -> dict[str, Tensor]:
    return {"scores": scores, "logits": scores.float()}


def images(*values: int) -> np.ndarray:
    return np.stack([np.full(SHAPE, value, np.uint8) for value in values])


def watchless() -> StandInOps:
    """Return a device whose computation may look at its images, as `Sums` does."""
    return StandInOps(strict=False)


def launcher(
    ops: StandInOps, compute: Sums, *, max_batch: int = 4, slots: int = 2
) -> BatchLauncher:
    return BatchLauncher(ops, compute, shape=SHAPE, max_batch=max_batch, slots=slots)


def test_an_earlier_batch_leaves_no_trace() -> None:
    ops = watchless()
    compute = Sums()
    subject = launcher(ops, compute)
    subject.run(images(9, 9, 9, 9), BatchRequest(), size=4)
    found = subject.run(images(1, 2), BatchRequest(), size=4)
    assert found["scores"][:, 0].tolist() == [6, 12]
    assert compute.sizes == [4, 4]


def test_a_computation_waits_for_its_upload() -> None:
    ops = watchless()
    subject = launcher(ops, Sums(), slots=1)  # stream 0 computes, stream 1 copies
    subject.run(images(1), BatchRequest(), size=1)
    assert ops.log == [("record", 1), ("wait for 1", 0), ("record", 0), ("synchronize", 0)]


def test_a_captured_request_is_replayed() -> None:
    ops = watchless()
    compute = Sums()
    subject = launcher(ops, compute)
    subject.capture(compute, (1, 2, 4), (BatchRequest(3), BatchRequest(3, layers=(7,))))
    assert compute.sizes[0] == 4, "the largest is captured first"
    before = ops.replays
    plain = subject.run(images(1, 2), BatchRequest(3, logits=True), size=2)
    mapped = subject.run(images(3), BatchRequest(3, layers=(7,)), size=4)
    assert ops.replays == before + 2
    assert (plain["scores"][:, 0].tolist(), plain["scores"].shape) == ([6, 12], (2, 3))
    assert mapped["scores"][:, 0].tolist() == [1018]
    assert (plain["logits"].tolist(), set(mapped)) == ([[3, 2], [6, 2]], {"scores"})


def test_uncaptured_requests_are_computed() -> None:
    ops = watchless()
    compute = Sums()
    subject = launcher(ops, compute)
    subject.capture(compute, (4,), (BatchRequest(3),))
    before = ops.replays
    assert subject.run(images(1), BatchRequest(3), size=2)["scores"][:, 0].tolist() == [
        6
    ]  # another size
    assert subject.run(images(1), BatchRequest(3, layers=(0, 7)), size=4)["scores"][
        :, 0
    ].tolist() == [2006]  # other layers
    wide = subject.run(images(1), BatchRequest(4, logits=True), size=4)  # more classes
    assert (wide["scores"].shape, wide["logits"].tolist()) == ((1, 4), [[3, 4]])
    assert ops.replays == before


def test_a_slot_is_used_again_after_a_fault() -> None:
    ops = watchless()
    subject = launcher(ops, Sums(), slots=1)
    settled = ops.settled
    with pytest.raises(RuntimeError, match="a fault of the device"):
        subject.run(images(FAULTY), BatchRequest(), size=1)
    assert ops.settled == settled + 1
    assert subject.run(images(5), BatchRequest(), size=1)["scores"][:, 0].tolist() == [30]
    assert ops.settled == settled + 1


@pytest.mark.parametrize("captured", [False, True])
def test_many_callers_get_their_own_answers(
    captured: bool,
) -> None:
    ops = watchless()
    compute = Sums()
    subject = launcher(ops, compute, slots=2)
    if captured:
        subject.capture(compute, (1, 2, 4), (BatchRequest(),))

    def ask(value: int) -> list[int]:
        batch = images(*(value % 7 + row for row in range(1 + value % 4)))
        size = next(size for size in (1, 2, 4) if size >= len(batch))
        found: list[int] = subject.run(batch, BatchRequest(), size=size)["scores"][:, 0].tolist()
        return found

    with ThreadPoolExecutor(5) as pool:
        answers = list(pool.map(ask, range(200)))

    assert answers == [
        [6 * (value % 7 + row) for row in range(1 + value % 4)] for value in range(200)
    ]
    assert compute.at_once == 0


def test_a_graph_holds_no_older_workspace() -> None:
    """cuBLAS frees its old workspaces, so a graph that holds one would write to foreign memory."""
    ops = StandInOps()
    weight = torch.ones(6, 3)

    def compute(pixels: Tensor, request: BatchRequest) -> dict[str, Tensor]:
        return computed(pixels.flatten(1).float() @ weight)

    subject = BatchLauncher(ops, compute, shape=SHAPE, max_batch=2, slots=1)
    subject.capture(compute, (1, 2), (BatchRequest(),))
    assert ops.captures == 2


def test_a_capture_that_waits_is_refused() -> None:
    ops = StandInOps()

    def compute(pixels: Tensor, request: BatchRequest) -> dict[str, Tensor]:
        return computed(torch.full((len(pixels), 3), int(pixels.sum().item()), dtype=torch.int32))

    subject = BatchLauncher(ops, compute, shape=SHAPE, max_batch=2, slots=1)
    with pytest.raises(CaptureFailed, match=r"the capture of 2 images failed: .*aten.item"):
        subject.capture(compute, (1, 2), (BatchRequest(),))


def test_a_dead_device_fails_every_batch() -> None:
    ops = watchless()
    subject = launcher(ops, Sums(), slots=1)
    ops.dead = "an illegal memory access was encountered"
    for _ in range(3):
        with pytest.raises(RuntimeError, match="illegal memory access"):
            subject.run(images(1), BatchRequest(), size=1)


def test_each_capture_has_its_own_stream() -> None:
    ops = StandInOps()

    def compute(pixels: Tensor, request: BatchRequest) -> dict[str, Tensor]:
        return computed(torch.zeros(len(pixels), 2 * request.top_k + 1, dtype=torch.int32))

    subject = BatchLauncher(ops, compute, shape=SHAPE, max_batch=2, slots=1)
    subject.run(
        images(1), BatchRequest(), size=1
    )  # the stand-in cannot capture on a stream with a download
    settled = ops.settled
    subject.capture(compute, (1, 2), (BatchRequest(),))
    assert ops.settled == settled + 5, "before and after each capture, and before the next batch"


def test_a_batch_can_run_beside_its_graph() -> None:
    ops = watchless()
    compute = Sums()
    subject = launcher(ops, compute)
    subject.capture(compute, (1, 2, 4), (BatchRequest(3),))
    before = ops.replays

    def doubled(pixels: Tensor, request: BatchRequest) -> dict[str, Tensor]:
        outputs = compute(pixels, request)
        return outputs | {"scores": 2 * outputs["scores"]}

    assert subject.run(images(1), BatchRequest(3), size=2, compute=doubled)["scores"][
        :, 0
    ].tolist() == [12]
    assert ops.replays == before
    subject.forget_graphs()
    assert subject.run(images(1), BatchRequest(3), size=2)["scores"][:, 0].tolist() == [6]
    assert ops.replays == before


@pytest.fixture
def torch_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    enabled = torch.backends.cuda.cudnn_sdp_enabled()
    yield
    torch.backends.cuda.enable_cudnn_sdp(enabled)


@dataclass(frozen=True)
class PooledStream:
    """A stream of torch's 32 per priority, which are reused in turn."""

    number: tuple[int, int]


@pytest.fixture
def pool_of_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = defaultdict[int, Iterator[int]](lambda: itertools.cycle(range(32)))
    monkeypatch.setattr(
        torch.cuda, "Stream", lambda _, priority=0: PooledStream((priority, next(turns[priority])))
    )


class PooledOps(StandInOps):
    """A stand-in with CUDA's streams, which counts those of batches."""

    def __init__(self) -> None:
        super().__init__()
        self.of_batches = set[Any]()
        self.of_captures = list[Any]()
        self._cuda = CudaOps(torch.device("cuda", 0))

    def stream(self) -> Any:
        stream = self._cuda.stream()
        self.of_batches.add(stream)
        return stream

    def capture_stream(self) -> Any:
        stream = self._cuda.capture_stream()
        self.of_captures.append(stream)
        return stream


def loaded() -> tuple[PooledOps, BatchLauncher]:
    def compute(pixels: Tensor, request: BatchRequest) -> dict[str, Tensor]:
        return computed(torch.zeros(len(pixels), 1, dtype=torch.int32))

    ops = PooledOps()
    subject = BatchLauncher(ops, compute, shape=SHAPE, max_batch=2, slots=2)
    subject.capture(compute, (2,), (BatchRequest(),))
    return ops, subject


@pytest.mark.usefixtures("torch_without_a_gpu", "pool_of_streams")
def test_no_capture_shares_a_models_stream() -> None:
    live = [loaded()]
    for _ in range(40):
        of_others = [ops for ops, _ in live]
        live.append(loaded())
        captures = live[-1][0].of_captures[0]
        assert all(
            captures not in ops.of_batches and captures not in ops.of_captures for ops in of_others
        )
        del live[1:-2]  # the first model stays


@pytest.mark.usefixtures("torch_without_a_gpu", "pool_of_streams")
def test_only_32_models_get_graphs() -> None:
    live = [loaded() for _ in range(32)]
    with pytest.raises(DeviceError, match="32 loaded models have CUDA graphs"):
        loaded()
    del live[5]
    loaded()


@pytest.mark.usefixtures("torch_without_a_gpu")
def test_attention_is_never_cudnn() -> None:
    """The switch affects the whole process, and once stayed on for batches during a capture."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    CudaOps(torch.device("cuda", 0))
    assert not torch.backends.cuda.cudnn_sdp_enabled()
