"""A device for `model.runtime.batch_launcher` that every machine has: it does at once, in the order of the calls, what
a GPU does later, and writes down what would have waited for what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class StandInStream:
    """Only a number."""

    number: int


class StandInEvent:
    """Writes down what happens to it."""

    def __init__(self, log: list[tuple[str, int]]) -> None:
        self._log = log
        self._recorded: StandInStream | None = None

    def record(self, stream: StandInStream) -> None:
        self._recorded = stream
        self._log.append(("record", stream.number))

    def wait(self, stream: StandInStream) -> None:
        assert self._recorded is not None, "waits for nothing"
        self._log.append((f"wait for {self._recorded.number}", stream.number))

    def synchronize(self) -> None:
        assert self._recorded is not None, "waits for nothing"
        self._log.append(("synchronize", self._recorded.number))


class StandInOps:
    """`DeviceOps` on the CPU. A captured graph is the work itself, run again on the same memory.

    Attributes:
        log: what happened to events, in order, and the number of the stream.
        replays: how often a graph ran.
        settled: how often the device was waited for.
        fail_capture: what a capture raises.
        spoil_capture: whether captured graphs do nothing.
    """

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.log: list[tuple[str, int]] = []
        self.replays = 0
        self.settled = 0
        self.fail_capture: RuntimeError | None = None
        self.spoil_capture = False
        self._streams = 0

    def stream(self) -> StandInStream:
        self._streams += 1
        return StandInStream(self._streams - 1)

    @contextmanager
    def on(self, stream: StandInStream) -> Iterator[None]:
        yield

    def event(self) -> StandInEvent:
        return StandInEvent(self.log)

    def pinned(self, shape: Sequence[int]) -> Tensor:
        return torch.zeros(tuple(shape), dtype=torch.uint8)

    def download(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    def capture(self, work: Callable[[], None], stream: StandInStream) -> Callable[[], None]:
        if self.fail_capture is not None:
            raise self.fail_capture
        work()

        def replay() -> None:
            self.replays += 1
            if not self.spoil_capture:
                work()

        return replay

    def settle(self) -> None:
        self.settled += 1
