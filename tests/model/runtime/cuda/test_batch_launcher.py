"""Batches on their way to a device and back, on a device that every machine has."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor

from model.runtime.backend import BatchRequest
from model.runtime.cuda.batch_launcher import BatchLauncher
from tests.model.runtime.cuda.device_stand_in import StandInOps

SHAPE = (2, 3, 1)
FAULTY = 255


class Sums:
    """Answers each image with the sum of its bytes; fails on `FAULTY`."""

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
            return {"scores": pixels.flatten(1).int().sum(dim=1, keepdim=True, dtype=torch.int32)}
        finally:
            self._inside.release()


def images(*values: int) -> np.ndarray:
    return np.stack([np.full(SHAPE, value, np.uint8) for value in values])


def watchless() -> StandInOps:
    """Return a device on which the computation may look at its images, as `Sums` does."""
    return StandInOps(strict=False)


def launcher(ops: StandInOps, compute: Sums, *, max_batch: int = 4, slots: int = 2) -> BatchLauncher:
    return BatchLauncher(ops, compute, shape=SHAPE, max_batch=max_batch, slots=slots)


def test_each_image_is_answered_whatever_an_earlier_batch_left_behind() -> None:
    ops, compute = watchless(), Sums()
    subject = launcher(ops, compute)
    subject.run(images(9, 9, 9, 9), BatchRequest(), size=4)
    found = subject.run(images(1, 2), BatchRequest(), size=4)
    assert found["scores"][:, 0].tolist() == [6, 12]
    assert compute.sizes == [4, 4]


def test_the_computation_waits_for_its_upload_and_the_caller_for_the_computation() -> None:
    ops = watchless()
    subject = launcher(ops, Sums(), slots=1)  # stream 0 computes, stream 1 copies
    subject.run(images(1), BatchRequest(), size=1)
    assert ops.log == [("record", 1), ("wait for 1", 0), ("record", 0), ("synchronize", 0)]


def test_after_a_fault_the_device_is_waited_for_and_the_slot_is_used_again() -> None:
    ops = watchless()
    subject = launcher(ops, Sums(), slots=1)
    settled = ops.settled
    with pytest.raises(RuntimeError, match="a fault of the device"):
        subject.run(images(FAULTY), BatchRequest(), size=1)
    assert ops.settled == settled + 1
    assert subject.run(images(5), BatchRequest(), size=1)["scores"][:, 0].tolist() == [30]
    assert ops.settled == settled + 1


@pytest.mark.parametrize("captured", [False, True])
def test_more_callers_than_slots_get_their_own_answers_one_computation_at_a_time(captured: bool) -> None:
    ops, compute = watchless(), Sums()
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

    assert answers == [[6 * (value % 7 + row) for row in range(1 + value % 4)] for value in range(200)]
    assert compute.at_once == 0
