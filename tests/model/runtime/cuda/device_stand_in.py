"""A device for the batch launcher that every machine has.

It runs operations at once, in the order of the calls, and records the waits of a GPU. It fails on
the same mistakes as a GPU:

* A downloaded tensor holds poison until a thread waits for the event after the download.
* Inside a capture, operations that make the host wait raise; so does creating streams, events and
  pinned memory.
* A failed capture hides its reason, and later captures fail.
* A stream with a download cannot be captured, because freed memory records an event on it.
* A graph is refused if its products use a workspace that its stream had before the capture, because
  other work may free it.
* After a fault every operation fails.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

POISON = 0x5A

_aten = torch.ops.aten
_WAITING = {
    _aten.item,
    _aten._local_scalar_dense,
    _aten.nonzero,
    _aten.equal,
    _aten.is_nonzero,
    _aten.masked_select,
}
_PRODUCTS = {
    _aten.linear,
    _aten.matmul,
    _aten.mm,
    _aten.addmm,
    _aten.bmm,
    _aten.baddbmm,
    _aten._scaled_mm,
}


@dataclass(frozen=True)
class StandInStream:
    """A stream that is only a number."""

    number: int


class StandInEvent:
    """An event that logs its calls; after a wait for it, earlier downloads are complete."""

    def __init__(self, ops: StandInOps) -> None:
        self._ops = ops
        self._recorded: StandInStream | None = None
        self._downloads: list[tuple[Tensor, Tensor]] = []

    def record(self, stream: StandInStream) -> None:
        self._ops.need_life()
        self._recorded = stream
        self._downloads = self._ops.take_downloads()
        self._ops.log.append(("record", stream.number))

    def wait(self, stream: StandInStream) -> None:
        assert self._recorded is not None, "waits for nothing"
        self._ops.log.append((f"wait for {self._recorded.number}", stream.number))

    def synchronize(self) -> None:
        assert self._recorded is not None, "waits for nothing"
        self._ops.refuse_in_capture("event.synchronize")
        self._ops.before_synchronize()
        self._ops.need_life()
        for host, content in self._downloads:
            host.copy_(content)
        self._ops.log.append(("synchronize", self._recorded.number))


class StandInOps:
    """`DeviceOps` on the CPU. A captured graph is the work itself, run again on the same memory.

    Attributes:
        log: calls of events, in order, with the number of the stream.
        replays: number of runs of graphs.
        captures: number of captured graphs.
        settled: number of waits for the device.
        fail_capture: error of the first operator in a capture.
        spoil_capture: whether captured graphs do nothing.
        largest_allocation: bytes of one tensor on the launcher's stream, beyond which memory runs
        out.
        dead: why every operation fails; None while the device lives.
        before_synchronize: called by who waits for an event.
        strict: whether operators are watched, which torch.compile does not bear.
    """

    def __init__(self, *, strict: bool = True) -> None:
        self.device = torch.device("cpu")
        self.log: list[tuple[str, int]] = []
        self.replays = 0
        self.captures = 0
        self.settled = 0
        self.fail_capture: Exception | None = None
        self.spoil_capture = False
        self.largest_allocation: int | None = None
        self.dead: str | None = None
        self.before_synchronize: Callable[[], object] = lambda: None
        self.strict = strict
        self.workspaces: set[StandInStream | None] = set()
        self._capturing_thread: int | None = None
        self._broken = False
        self._streams = 0
        self._current = threading.local()
        self._downloaded_on: set[StandInStream | None] = set()

    @property
    def capturing(self) -> bool:
        """Whether this thread captures; other threads may use the device meanwhile."""
        return self._capturing_thread == threading.get_ident()

    def need_life(self) -> None:
        if self.dead is not None:
            raise torch.AcceleratorError(f"CUDA error: {self.dead}")

    def refuse_in_capture(self, what: str) -> None:
        if self.capturing:
            raise torch.AcceleratorError(
                f"CUDA error: operation not permitted when stream is capturing: {what}"
            )

    def stream(self) -> StandInStream:
        self.refuse_in_capture("a stream is made")
        self._streams += 1
        return StandInStream(self._streams - 1)

    def capture_stream(self) -> StandInStream:
        return self.stream()

    @contextmanager
    def on(self, stream: StandInStream) -> Iterator[None]:
        before = getattr(self._current, "stream", None)
        self._current.stream = stream
        try:
            with _Watch(self) if self.strict else nullcontext():
                yield
        finally:
            self._current.stream = before

    def event(self) -> StandInEvent:
        self.refuse_in_capture("an event is made")
        return StandInEvent(self)

    def pinned(self, shape: Sequence[int]) -> Tensor:
        self.refuse_in_capture("memory is pinned")
        self.need_life()
        return torch.zeros(tuple(shape), dtype=torch.uint8)

    def download(self, tensor: Tensor) -> Tensor:
        self.refuse_in_capture("memory is pinned")
        self.need_life()
        self._downloaded_on.add(self._current.stream)
        host = torch.empty_like(tensor)
        host.view(torch.uint8).fill_(POISON)
        # Per thread instead of per stream, because a thread uses one stream at a time.
        self._current.downloads = [*self.take_downloads(), (host, tensor.clone())]
        return host

    def take_downloads(self) -> list[tuple[Tensor, Tensor]]:
        """Return host memory and its later content, for this thread's last downloads."""
        downloads: list[tuple[Tensor, Tensor]] = getattr(self._current, "downloads", [])
        self._current.downloads = []
        return downloads

    def capture(self, work: Callable[[], None], stream: StandInStream) -> Callable[[], None]:
        self.need_life()
        if self._broken:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")
        assert stream not in self._downloaded_on, (
            "memory that is freed would record an event in the graph"
        )
        assert self._current.stream == stream, "the work goes to another stream"
        assert stream not in self.workspaces, "the graph holds a workspace that others free"
        self._capturing_thread = threading.get_ident()
        try:
            work()
        except Exception:  # noqa: BLE001
            self._broken = True
            raise torch.AcceleratorError(
                "CUDA error: operation failed due to a previous error during capture"
            ) from None
        finally:
            self._capturing_thread = None
        self.captures += 1

        def replay() -> None:
            self.need_life()
            self.replays += 1
            if not self.spoil_capture:
                work()

        return replay

    def synchronize(self) -> None:
        self.refuse_in_capture("the device is waited for")
        self.settled += 1


class _Watch(TorchDispatchMode):
    """A mode that checks each operator on a stream of a stand-in."""

    def __init__(self, ops: StandInOps) -> None:
        super().__init__()
        self._ops = ops

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        ops = self._ops
        packet = func.overloadpacket
        ops.need_life()
        if ops.capturing and ops.fail_capture is not None:
            raise ops.fail_capture
        if packet in _WAITING:
            ops.refuse_in_capture(str(func))
        if packet in _PRODUCTS and not ops.capturing:
            ops.workspaces.add(getattr(ops._current, "stream", None))
        found = func(*args, **(kwargs or {}))
        if (
            ops.largest_allocation is not None
            and isinstance(found, Tensor)
            and found.nbytes > ops.largest_allocation
        ):
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB.\nmore lines"
            )
        return found
