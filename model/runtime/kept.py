"""A predictor made of graphs that were kept, without torch, and how torch is loaded once something needs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from model.calibration import CALIBRATION_FILE
from model.cores import compute_threads
from model.errors import CheckpointChanged, DeviceError, VitError
from model.runtime.backend import Built
from model.runtime.batches import BatchRequest
from model.runtime.cpu import ThreadPolicy, default_batch, default_streams
from model.runtime.openvino.backend import REASON, LazyTorch, OpenVino
from model.runtime.openvino.network import OpenVinoNetwork
from model.runtime.openvino.store import Entry, Keep, KeptCheckpoint, Manifest, changed_file, same_files
from model.runtime.predictor import Predictor
from model.runtime.scores import Floats, Scores

if TYPE_CHECKING:
    from model.checkpoint import Checkpoint
    from model.runtime.torch_backend import TorchOptions
    from model.runtime.torch_cpu import TorchCpu


@dataclass
class _Torch:
    """Loads the checkpoint of a kept graph with torch, when it is needed; fields are as in `kept_predictor`."""

    entry: Entry
    manifest: Manifest
    threads: ThreadPolicy
    streams: int
    max_batch: int
    read: Callable[[], Checkpoint]
    lazy: bool
    tower: Callable[[Sequence[str]], Floats] | None = None

    def checkpoint(self) -> Checkpoint:
        """Return the checkpoint, read again.

        Raises:
            CheckpointChanged: its files are not those that the graph was made of.
            RuntimeError: they cannot be read.
        """
        try:
            checkpoint = self.read()
        except (VitError, ImportError) as error:
            raise RuntimeError(f"what torch is to compute cannot be loaded: {error}") from error
        if changed := changed_file(self.manifest, but=CALIBRATION_FILE):
            raise CheckpointChanged(f"{changed} changed since the start: what torch is to compute needs a reload")
        # A calibration that was written since does not change the weights: it is for the next start.
        kept = self.manifest.checkpoint
        return replace(checkpoint, temperature=kept.temperature, calibration=kept.calibration)

    def embed_texts(self, texts: Sequence[str]) -> Floats:
        """Return the features of texts; see `Checkpoint.embed_texts`. One thread calls it."""
        if self.tower is None:
            self.tower = self.checkpoint().embed_texts
            assert self.tower is not None, "the manifest says that it has one"
        return self.tower(texts)

    def options(self) -> TorchOptions:
        """Return the network and how torch runs it; raises as `checkpoint`."""
        checkpoint = self.checkpoint()
        import torch  # noqa: PLC0415  what this is for

        from model.runtime.device import DTYPES  # noqa: PLC0415
        from model.runtime.torch_backend import TorchOptions  # noqa: PLC0415

        dtype, cpu = DTYPES[self.manifest.dtype], torch.device("cpu")
        return TorchOptions(checkpoint.network(), checkpoint, cpu, dtype, "off", (self.max_batch,))

    def backend(self) -> TorchCpu:
        """Return torch's backend; raises as `checkpoint`."""
        options = self.options()
        import torch  # noqa: PLC0415

        from model.runtime.torch_cpu import TorchCpu  # noqa: PLC0415

        torch.set_num_threads(self.threads.count)
        return TorchCpu(options, self.threads)

    def network(self, extras: BatchRequest) -> OpenVinoNetwork:
        """Return a network that gives these extras: of a graph that was kept, or made now and kept then."""
        manifest, threads, streams = self.manifest, self.threads.count, self.streams
        kept = self.entry.load(extras)
        # Another process may have kept a graph of other weights, which took the place of these on disk.
        if kept is not None and same_files(kept[0], manifest):
            return OpenVinoNetwork(kept[1], manifest.dtype, threads=threads, streams=streams, lazy=self.lazy)
        from model.checkpoint.local_files import recording  # noqa: PLC0415
        from model.runtime.openvino.tracing import traced_network  # noqa: PLC0415

        with recording() as files:
            options = self.options()
        keep = Keep(self.entry, files)
        network = traced_network(options, threads=threads, streams=streams, extras=extras, workers=1, stage=keep.stage)
        keep.save(extras, options.checkpoint, manifest.parameters, manifest.dtype)
        return network


def kept_predictor(
    entry: Entry,
    read: Callable[[], Checkpoint],
    on_read: Callable[[KeptCheckpoint], None] = lambda _: None,
    *,
    lazy: bool = False,
    max_batch: int | None = None,
    threads: int | None = None,
    streams: int | None = None,
) -> Predictor | None:
    """Return a predictor of graphs that were kept, or None where there are none, or they no longer compile.

    Args:
        entry: where they are kept.
        read: reads the checkpoint, with torch.
        on_read: called when a graph was found and read, before it is compiled; what it raises is raised.
        lazy: see `OpenVinoNetwork`.
        max_batch, threads, streams: see `Predictor`.
    """
    found = entry.load()
    if found is None:
        return None
    manifest, graph = found
    checkpoint = manifest.checkpoint
    on_read(checkpoint)
    policy = ThreadPolicy(threads or compute_threads())
    streams = streams or default_streams(policy.count)
    max_batch = max_batch or default_batch(manifest.largest_layer)
    try:
        network = OpenVinoNetwork(graph, manifest.dtype, threads=policy.count, streams=streams, lazy=True)
        if not lazy:
            network.compile_first()
    except DeviceError:
        return None
    later = _Torch(entry, manifest, policy, streams, max_batch, read, lazy)
    if checkpoint.zero_shot is not None:
        checkpoint = checkpoint.model_copy(update={"embed_texts": later.embed_texts})
    built = Built(
        device="cpu",
        dtype=manifest.dtype,
        gpu_uuid=None,
        parameters=manifest.parameters,
        max_batch=max_batch,
        streams=streams,
        backend=OpenVino(
            network, Scores(checkpoint), policy, LazyTorch(later.backend), later.network, network.complete
        ),
        reason=REASON,
    )
    return Predictor.of_parts(checkpoint, built, lazy=lazy)
