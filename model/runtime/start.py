"""A predictor from kept graphs, which loads torch only when something needs it.

See docs/decisions/kept-graphs.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from model.calibration import CALIBRATION_FILE
from model.description import Description
from model.errors import CheckpointChanged, DeviceError, VitError
from model.features import Floats
from model.runtime.backend import Parts
from model.runtime.batch_request import GraphKind
from model.runtime.cpu import ThreadPolicy, default_batch
from model.runtime.memory import Meter
from model.runtime.openvino.backend import REASON, OpenVino
from model.runtime.openvino.kept import Keep, KeptEntry, Manifest
from model.runtime.openvino.network import OpenVinoNetwork
from model.runtime.predictor import Predictor

if TYPE_CHECKING:
    from model.checkpoint import Checkpoint
    from model.runtime.torch_backend import TorchCpu, TorchOptions


@dataclass(slots=True)
class _Torch:
    """Builds, on demand, the parts of a kept graph's checkpoint that need torch.

    Attributes:
        entry, manifest: the graph.
        read: reads the checkpoint.
        threads: see `ThreadPolicy`.
        tower: function of the text tower, once it is loaded.
    """

    entry: KeptEntry
    manifest: Manifest
    read: Callable[[], Checkpoint]
    threads: ThreadPolicy
    tower: Callable[[Sequence[str]], Floats] | None = None

    def checkpoint(self) -> Checkpoint:
        """Read the checkpoint again.

        Raises:
            CheckpointChanged: its files have changed since the graph was made.
            RuntimeError: they cannot be read.
        """
        try:
            checkpoint = self.read()
        except (VitError, ImportError) as error:
            raise RuntimeError(f"torch cannot load the checkpoint: {error}") from error
        changed = self.manifest.changed_file(but=CALIBRATION_FILE)
        if changed:
            raise CheckpointChanged(
                f"{changed} changed since the start: reload the model for outputs of torch"
            )
        # A calibration that was written since does not change the weights; the next start uses it.
        kept = self.manifest.checkpoint
        return replace(
            checkpoint, temperature=kept.temperature, form=kept.form, calibration=kept.calibration
        )

    def embed_texts(self, texts: Sequence[str]) -> Floats:
        """Return the features of texts; see `Checkpoint.embed_texts`. Only one thread calls it."""
        if self.tower is None:
            self.tower = self.checkpoint().embed_texts
            assert self.tower is not None, "the manifest says that it has one"
        return self.tower(texts)

    def options(self) -> TorchOptions:
        """Return the network and options of torch; raise as `checkpoint`."""
        checkpoint = self.checkpoint()
        import torch  # noqa: PLC0415  torch takes a second to import

        from model.runtime.device import DTYPES  # noqa: PLC0415
        from model.runtime.torch_backend import TorchOptions  # noqa: PLC0415

        dtype = DTYPES[self.manifest.dtype]
        cpu = torch.device("cpu")
        return TorchOptions(checkpoint.network(), checkpoint, cpu, dtype, "off", (1,))

    def backend(self) -> TorchCpu:
        """Return torch's backend; raise as `checkpoint`."""
        options = self.options()
        from model.runtime.torch_backend import TorchCpu  # noqa: PLC0415

        return TorchCpu(options, self.threads)

    def network(self, kind: GraphKind) -> OpenVinoNetwork:
        """Return a further network, from a kept graph or one that is traced now."""
        manifest = self.manifest
        kept = self.entry.load(kind=kind)
        if kept is not None:
            kept_manifest, graph = kept
            # Another process may have replaced the graph on disk by one of other weights.
            if kept_manifest.files == manifest.files:
                return OpenVinoNetwork(graph, manifest.dtype, self.threads)
        from model.checkpoint.local_files import recording  # noqa: PLC0415
        from model.runtime.openvino.tracing import traced_network  # noqa: PLC0415

        with recording() as files:
            options = self.options()
        return traced_network(
            options,
            manifest.parameters,
            Keep(self.entry, files),
            kind,
            self.threads,
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
    policy = ThreadPolicy(threads, None)
    try:
        network = OpenVinoNetwork(graph, manifest.dtype, policy)
    except DeviceError:
        return None
    torch = _Torch(entry, manifest, read, policy)
    if checkpoint.zero_shot is not None:
        checkpoint = replace(checkpoint, embed_texts=torch.embed_texts)
    backend = OpenVino(network, policy, torch.backend, torch.network)
    largest = max_batch or default_batch(manifest.largest_layer)
    parts = Parts(
        "cpu", manifest.dtype, None, manifest.parameters, largest, policy.streams, backend, REASON
    )
    predictor = Predictor(checkpoint, parts)
    predictor.meter = meter
    return predictor
