"""A predictor from kept graphs, which loads torch only when something needs it.

See docs/decisions/kept-graphs.md.
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
from model.runtime.backend import Parts
from model.runtime.batch_request import GraphKind
from model.runtime.cpu import ThreadPolicy, default_batch, default_streams
from model.runtime.memory import Meter
from model.runtime.openvino.backend import REASON, OpenVino
from model.runtime.openvino.kept import Keep, KeptEntry, Manifest
from model.runtime.openvino.network import OpenVinoNetwork
from model.runtime.predictor import Predictor

if TYPE_CHECKING:
    from model.checkpoint import Checkpoint
    from model.runtime.torch_backend import TorchCpu, TorchOptions


class _Torch:
    """Builds what torch computes of a kept graph's checkpoint, on demand."""

    def __init__(
        self,
        entry: KeptEntry,
        manifest: Manifest,
        read: Callable[[], Checkpoint],
        threads: ThreadPolicy,
        streams: int,
    ) -> None:
        self._entry = entry
        self._manifest = manifest
        self._read = read
        self._threads = threads
        self._streams = streams
        self._tower: Callable[[Sequence[str]], Floats] | None = None

    def checkpoint(self) -> Checkpoint:
        """Read the checkpoint again.

        Raises:
            CheckpointChanged: its files have changed since the graph was made.
            RuntimeError: they cannot be read.
        """
        try:
            checkpoint = self._read()
        except (VitError, ImportError) as error:
            raise RuntimeError(f"torch cannot load the checkpoint: {error}") from error
        changed = self._manifest.changed_file(but=CALIBRATION_FILE)
        if changed:
            raise CheckpointChanged(
                f"{changed} changed since the start: reload the model for outputs of torch"
            )
        # A calibration that was written since does not change the weights; the next start uses it.
        kept = self._manifest.checkpoint
        return replace(
            checkpoint, temperature=kept.temperature, form=kept.form, calibration=kept.calibration
        )

    def embed_texts(self, texts: Sequence[str]) -> Floats:
        """Return the features of texts; see `Checkpoint.embed_texts`. Only one thread calls it."""
        if self._tower is None:
            self._tower = self.checkpoint().embed_texts
            assert self._tower is not None, "the manifest says that it has one"
        return self._tower(texts)

    def options(self) -> TorchOptions:
        """Return the network and options of torch; raise as `checkpoint`."""
        checkpoint = self.checkpoint()
        import torch  # noqa: PLC0415  torch takes a second to import

        from model.runtime.device import DTYPES  # noqa: PLC0415
        from model.runtime.torch_backend import TorchOptions  # noqa: PLC0415

        dtype = DTYPES[self._manifest.dtype]
        cpu = torch.device("cpu")
        return TorchOptions(checkpoint.network(), checkpoint, cpu, dtype, "off", (1,))

    def backend(self) -> TorchCpu:
        """Return torch's backend; raise as `checkpoint`."""
        options = self.options()
        from model.runtime.torch_backend import TorchCpu  # noqa: PLC0415

        return TorchCpu(options, self._threads)

    def network(self, kind: GraphKind) -> OpenVinoNetwork:
        """Return a further network, from a kept graph or one that is traced now."""
        manifest = self._manifest
        kept = self._entry.load(kind=kind)
        if kept is not None:
            kept_manifest, graph = kept
            # Another process may have replaced the graph on disk by one of other weights.
            if kept_manifest.files == manifest.files:
                return OpenVinoNetwork(
                    graph, manifest.dtype, threads=self._threads.count, streams=self._streams
                )
        from model.checkpoint.local_files import recording  # noqa: PLC0415
        from model.runtime.openvino.tracing import traced_network  # noqa: PLC0415

        with recording() as files:
            options = self.options()
        return traced_network(
            options,
            manifest.parameters,
            Keep(self._entry, files),
            kind,
            threads=self._threads.count,
            streams=self._streams,
        )


def kept_predictor(
    entry: KeptEntry,
    read: Callable[[], Checkpoint],
    on_read: Callable[[Description], None] = lambda _: None,
    *,
    manifest: Manifest | None = None,
    max_batch: int | None = None,
    threads: int | None = None,
) -> Predictor | None:
    """Build a predictor from kept graphs; None if they are missing or no longer compile.

    Args:
        entry: the kept graphs.
        read: reads the checkpoint, with torch.
        on_read: called after a graph is read and before it is compiled; its errors are raised.
        manifest: the entry's manifest, if the caller has read it.
        max_batch, threads: see `PredictorOptions`.
    """
    kept = entry.load(manifest)
    if kept is None:
        return None
    manifest, graph = kept
    meter = Meter()
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
    backend = OpenVino(network, policy, torch.backend, torch.network)
    largest = max_batch or default_batch(manifest.largest_layer)
    parts = Parts(
        "cpu", manifest.dtype, None, manifest.parameters, largest, streams, backend, REASON
    )
    predictor = Predictor(checkpoint, parts)
    predictor.meter = meter
    return predictor
