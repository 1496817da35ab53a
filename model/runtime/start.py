"""A predictor made of graphs that were kept, without torch, and how torch is loaded once something
needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from model.calibration import CALIBRATION_FILE
from model.cores import compute_threads
from model.description import Description
from model.errors import CheckpointChanged, DeviceError, VitError
from model.features import Floats
from model.runtime.backend import GraphKind, Parts, ThreadPolicy
from model.runtime.cpu import default_batch, default_streams
from model.runtime.memory import Meter
from model.runtime.openvino.backend import REASON, OpenVino, OpenVinoNetwork
from model.runtime.openvino.kept import Entry, Keep, Manifest
from model.runtime.predictor import Predictor

if TYPE_CHECKING:
    from model.checkpoint import Checkpoint
    from model.runtime.torch_backend import TorchCpu, TorchOptions


class _Torch:
    """What torch makes of a kept graph's checkpoint, when it is needed."""

    def __init__(
        self,
        entry: Entry,
        manifest: Manifest,
        read: Callable[[], Checkpoint],
        threads: ThreadPolicy,
        streams: int,
    ) -> None:
        self._entry, self._manifest, self._read = entry, manifest, read
        self._threads, self._streams = threads, streams
        self._tower: Callable[[Sequence[str]], Floats] | None = None

    def checkpoint(self) -> Checkpoint:
        """Return the checkpoint, read again.

        Raises:
            CheckpointChanged: its files are not those that the graph was made of.
            RuntimeError: they cannot be read.
        """
        try:
            checkpoint = self._read()
        except (VitError, ImportError) as error:
            raise RuntimeError(f"what torch is to compute cannot be loaded: {error}") from error
        if changed := self._manifest.changed_file(but=CALIBRATION_FILE):
            raise CheckpointChanged(
                f"{changed} changed since the start: what torch is to compute needs a reload"
            )
        # A calibration that was written since does not change the weights: it is for the next
        # start.
        kept = self._manifest.checkpoint
        return replace(
            checkpoint, temperature=kept.temperature, form=kept.form, calibration=kept.calibration
        )

    def embed_texts(self, texts: Sequence[str]) -> Floats:
        """Return the features of texts; see `Checkpoint.embed_texts`. One thread calls it."""
        if self._tower is None:
            self._tower = self.checkpoint().embed_texts
            assert self._tower is not None, "the manifest says that it has one"
        return self._tower(texts)

    def options(self) -> TorchOptions:
        """Return the network and how torch runs it; raises as `checkpoint`."""
        checkpoint = self.checkpoint()
        import torch  # noqa: PLC0415  what this is for

        from model.runtime.device import DTYPES  # noqa: PLC0415
        from model.runtime.torch_backend import TorchOptions  # noqa: PLC0415

        cpu, dtype = torch.device("cpu"), DTYPES[self._manifest.dtype]
        return TorchOptions(checkpoint.network(), checkpoint, cpu, dtype, "off", (1,))

    def backend(self) -> TorchCpu:
        """Return torch's backend; raises as `checkpoint`."""
        options = self.options()
        from model.runtime.torch_backend import TorchCpu  # noqa: PLC0415

        return TorchCpu(options, self._threads)

    def network(self, kind: GraphKind) -> OpenVinoNetwork:
        """Return another network than the plain one: of a graph that was kept, or made now and kept
        then.
        """
        manifest, kept = self._manifest, self._entry.load(kind=kind)
        # Another process may have kept a graph of other weights, which took the place of these on
        # disk.
        if kept is not None and kept[0].files == manifest.files:
            return OpenVinoNetwork(
                kept[1], manifest.dtype, threads=self._threads.count, streams=self._streams
            )
        from model.checkpoint.local_files import recording  # noqa: PLC0415
        from model.runtime.openvino.tracing import traced_network  # noqa: PLC0415

        with recording() as files:
            options = self.options()
        keep, threads = Keep(self._entry, files), self._threads.count
        return traced_network(
            options, manifest.parameters, keep, kind, threads=threads, streams=self._streams
        )


def kept_predictor(
    entry: Entry,
    read: Callable[[], Checkpoint],
    on_read: Callable[[Description], None] = lambda _: None,
    *,
    manifest: Manifest | None = None,
    max_batch: int | None = None,
    threads: int | None = None,
) -> Predictor | None:
    """Return a predictor of graphs that were kept, or None where there are none, or they no longer
    compile.

    Args:
        entry: where they are kept.
        read: reads the checkpoint, with torch.
        on_read: called when a graph was found and read, before it is compiled; what it raises is
        raised.
        manifest: of the entry, if it was looked at already.
        max_batch, threads: see `Predictor`.
    """
    found = entry.load(manifest)
    if found is None:
        return None
    manifest, graph, meter = *found, Meter()
    checkpoint = manifest.checkpoint
    on_read(checkpoint)
    policy = ThreadPolicy(threads or compute_threads())
    streams = default_streams(policy.count)
    try:
        network = OpenVinoNetwork(graph, manifest.dtype, threads=policy.count, streams=streams)
    except DeviceError:
        return None
    torch = _Torch(entry, manifest, read, policy, streams)
    if checkpoint.zero_shot is not None:
        checkpoint = replace(checkpoint, embed_texts=torch.embed_texts)
    backend = OpenVino(network, checkpoint.head, policy, torch.backend, torch.network)
    largest = max_batch or default_batch(manifest.largest_layer)
    parts = Parts(
        "cpu", manifest.dtype, None, manifest.parameters, largest, streams, backend, REASON
    )
    predictor = Predictor(checkpoint, parts)
    predictor.meter = meter
    return predictor
