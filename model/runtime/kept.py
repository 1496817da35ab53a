"""A predictor made of graphs that were kept, without torch, and how torch is loaded once something needs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from model.conformal import CALIBRATION_FILE
from model.errors import DeviceError, VitError
from model.runtime.backend import Built
from model.runtime.batches import BatchRequest
from model.runtime.cpu import ThreadPolicy
from model.runtime.openvino.backend import LazyTorch, OpenVino
from model.runtime.openvino.network import OpenVinoNetwork
from model.runtime.openvino.store import Entry, Keep, MadeOf, Manifest, changed_file
from model.runtime.predictor import Predictor
from model.runtime.scores import Floats, Scores

if TYPE_CHECKING:
    from model.checkpoint import Checkpoint
    from model.runtime.torch_cpu import TorchCpu


class _Torch:
    """Loads the checkpoint of a kept graph with torch, when it is needed."""

    def __init__(
        self, entry: Entry, manifest: Manifest, threads: ThreadPolicy, read: Callable[[], Checkpoint], *, lazy: bool
    ) -> None:
        self._lazy = lazy
        self._entry, self._manifest, self._threads, self._read = entry, manifest, threads, read
        self._tower: Callable[[Sequence[str]], Floats] | None = None

    def checkpoint(self) -> Checkpoint:
        """Return the checkpoint, read again.

        Raises:
            RuntimeError: its files are not those that the graph was made of, or cannot be read.
        """
        try:
            checkpoint = self._read()
        except (VitError, ImportError) as error:
            raise RuntimeError(f"what torch is to compute cannot be loaded: {error}") from error
        if changed := changed_file(self._manifest, but=CALIBRATION_FILE):
            raise RuntimeError(f"{changed} changed since the start: what torch is to compute needs a reload")
        # A calibration that was written since does not change the weights: it is for the next start.
        kept = self._manifest.checkpoint
        return replace(checkpoint, temperature=kept.temperature, calibration=kept.calibration)

    def embed_texts(self, texts: Sequence[str]) -> Floats:
        """Return the features of texts; see `Checkpoint.embed_texts`. One thread calls it."""
        if self._tower is None:
            self._tower = self.checkpoint().embed_texts
            assert self._tower is not None, "the manifest says that it has one"
        return self._tower(texts)

    def backend(self) -> TorchCpu:
        """Return torch's backend; raises as `checkpoint`."""
        checkpoint = self.checkpoint()
        import torch  # noqa: PLC0415  what this is for

        from model.runtime.device import DTYPES  # noqa: PLC0415
        from model.runtime.torch_backend import TorchOptions  # noqa: PLC0415
        from model.runtime.torch_cpu import TorchCpu  # noqa: PLC0415

        manifest = self._manifest
        torch.set_num_threads(manifest.threads)
        dtype, cpu = DTYPES[manifest.dtype], torch.device("cpu")
        options = TorchOptions(checkpoint.network(), checkpoint, cpu, dtype, "off", (manifest.max_batch,))
        return TorchCpu(options, self._threads)

    def network(self, extras: BatchRequest) -> OpenVinoNetwork:
        """Return a network that gives these extras: of a graph that was kept, or made now and kept then."""
        manifest = self._manifest
        threads, streams = manifest.threads, manifest.streams
        if kept := self._entry.load(extras):
            return OpenVinoNetwork(kept[1], manifest.dtype, threads=threads, streams=streams, lazy=self._lazy)
        import torch  # noqa: PLC0415

        from model.checkpoint.local_files import recording  # noqa: PLC0415
        from model.runtime.device import DTYPES  # noqa: PLC0415
        from model.runtime.openvino.tracing import traced_network  # noqa: PLC0415
        from model.runtime.torch_backend import TorchOptions  # noqa: PLC0415

        with recording() as files:
            checkpoint = self.checkpoint()
        dtype, cpu = DTYPES[manifest.dtype], torch.device("cpu")
        options = TorchOptions(checkpoint.build(), checkpoint, cpu, dtype, "off", (manifest.max_batch,))
        keep = Keep(self._entry, files)
        network, _ = traced_network(
            options, threads=threads, streams=streams, extras=extras, workers=1, stage=keep.stage
        )
        made_of = MadeOf(manifest.parameters, manifest.dtype, threads, streams, manifest.max_batch, manifest.reason)
        keep.save(extras, checkpoint, made_of)
        return network


def kept_predictor(
    entry: Entry, read: Callable[[], Checkpoint], on_compile: Callable[[], None] = lambda: None, *, lazy: bool = False
) -> Predictor | None:
    """Return a predictor of graphs that were kept, or None where there are none, or they no longer compile.

    Args:
        entry: where they are kept.
        read: reads the checkpoint, with torch.
        on_compile: called when a graph was found and read.
        lazy: see `OpenVinoNetwork`.
    """
    found = entry.load()
    if found is None:
        return None
    on_compile()
    manifest, graph = found
    threads = ThreadPolicy(manifest.threads)
    try:
        sizes = {"threads": manifest.threads, "streams": manifest.streams}
        network = OpenVinoNetwork(graph, manifest.dtype, **sizes, lazy=True)
        if not lazy:
            network.compile_first()
    except DeviceError:
        return None
    later = _Torch(entry, manifest, threads, read, lazy=lazy)
    checkpoint = manifest.checkpoint
    if checkpoint.zero_shot is not None:
        checkpoint = checkpoint.model_copy(update={"embed_texts": later.embed_texts})
    backend = OpenVino(network, Scores(checkpoint), threads, LazyTorch(later.backend), later.network, network.complete)
    built = Built(
        device="cpu",
        dtype=manifest.dtype,
        gpu_uuid=None,
        parameters=manifest.parameters,
        agreement=None,
        max_batch=manifest.max_batch,
        streams=manifest.streams,
        backend=backend,
        reason=manifest.reason,
    )
    return Predictor.of_parts(checkpoint, built, lazy=lazy)
