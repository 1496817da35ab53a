"""A model on its device: a batch of uint8 images in, top-k classes and attention maps out.

One thread builds a predictor and warms it up. Then as many threads as there are streams, and the
thread of maps, may call `predict` at once.
"""

import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Unpack

import numpy as np

from model.calibration import label_sets_of
from model.config import NetworkConfig, ViTConfig
from model.description import Description
from model.errors import DeviceError, NotFinite, first_line
from model.features import Floats
from model.heads import Head
from model.outputs import Outputs, RequestedOutputs
from model.runtime.backend import Compilation, Images, Parts, batch_too_large, best_classes_of_graph
from model.runtime.batch_request import BatchRequest, HeadTable
from model.runtime.batch_sizes import launch_size
from model.runtime.memory import Meter
from model.runtime.mixed_batch import MixedBatch
from model.runtime.trial import trial_images

if TYPE_CHECKING:
    from model.runtime.build import PredictorOptions

logger = logging.getLogger(__name__)


class Predictor:
    """Owns device, dtype, backend and warm-up of one backbone, with a head for each model.

    Args:
        checkpoint: the model.
        parts: its parts, if they exist already; else they are built as the options say.
        options: see `PredictorOptions`.

    Attributes:
        checkpoint: the model; without tensors if its graphs were kept.
        device: name of the device: `cpu` or `cuda:N`.
        dtype: dtype of the computation.
        gpu_uuid: identifier of the GPU, whatever its number; None on the CPU.
        backend: the library that runs the network, with its version; torch always computes
            attention of other layers than the last.
        backend_reason: why this library runs the network.
        size: bytes of the tensors. On a GPU, the bytes allocated from the start to the end of the
            warm-up, if more.
        own: the checkpoint's own head, whose logits the network's pass gives.
        heads: all heads of the backbone by the names in requests; a request without a name is for
            the own head.
        coverage: coverage of the sets of labels; None without sets.

    Raises:
        DeviceError: the device or dtype is not available here.
        CheckpointError: the weights do not match the config.
    """

    device: str
    dtype: str
    gpu_uuid: str | None
    parameters: int
    max_batch: int
    streams: int
    backend: str
    backend_reason: str

    def __init__(
        self,
        checkpoint: Description,
        parts: Parts | None = None,
        **options: "Unpack[PredictorOptions]",
    ) -> None:
        self.checkpoint = checkpoint
        self.config = checkpoint.config
        self.own = checkpoint.head
        self.heads: dict[str, Head] = {}
        self.coverage: float | None = None
        self.meter = Meter()
        self.size = 0
        self._compiles_later = False
        if parts is None:
            self._build(options)
        else:
            self._take(parts)

    def _build(self, options: "PredictorOptions") -> None:
        """Build the parts; compute in float32 if scores overflow in a dtype that was not chosen."""
        from model.checkpoint import Checkpoint  # noqa: PLC0415  torch takes a second to import
        from model.runtime.build import build, may_overflow  # noqa: PLC0415

        assert isinstance(self.checkpoint, Checkpoint), "a kept checkpoint comes with parts"
        parts = build(self.checkpoint, options)
        self._take(parts)
        if not may_overflow(self.checkpoint, parts, options):
            return
        try:
            self.check()
        except DeviceError as error:
            if isinstance(self.config, ViTConfig) and not isinstance(error, NotFinite):
                raise
            logger.warning("%s: computing in float32 instead", error)
            self._take(build(self.checkpoint, {**options, "dtype": "float32"}))

    def _take(self, parts: Parts) -> None:
        self._backend = parts.backend
        self.device = parts.device
        self.dtype = parts.dtype
        self.gpu_uuid = parts.gpu_uuid
        self.parameters = parts.parameters
        self.max_batch = parts.max_batch
        self.streams = parts.streams
        self.backend = parts.backend.name
        self.backend_reason = parts.reason

    def set_coverage(self, coverage: float) -> None:
        """Give images that ask for them sets of labels with this coverage.

        Raises:
            CheckpointError: the checkpoint is not calibrated for it.
        """
        checkpoint = self.checkpoint
        label_sets = label_sets_of(
            checkpoint.calibration, coverage, checkpoint.source, checkpoint.unused_calibration
        )
        self.own = replace(self.own, label_sets=label_sets)
        self.coverage = coverage

    @property
    def compilation(self) -> Compilation:
        """Return the state of the compilation."""
        return self._backend.compilation

    @property
    def compiled(self) -> str:
        """Return the compilation as one line: `compiled`, `compiling`, or why not."""
        return str(self.compilation)

    @property
    def batch_sizes(self) -> tuple[int, ...] | None:
        """Return the launched sizes, up to which smaller batches are padded; None allows any."""
        return self._backend.batch_sizes

    def launch_size(self, count: int) -> int:
        """Return the size that a batch of `count` images is launched at."""
        return launch_size(count, self._backend.batch_sizes)

    def defers(self, requested: RequestedOutputs) -> bool:
        """Return whether an image belongs to the thread of maps.

        Torch computes it, or something is to be loaded first, which takes a second or two.
        """
        table = HeadTable(self.own, self.heads)
        if any(map(table.needs_aim, requested.head_requests)):
            return True
        if all(
            request.map is None and request.embedding is None for request in requested.head_requests
        ):
            return False
        return self._backend.defers(table.batch_request([requested], self.config))

    def warm_up(self, *, compile_later: bool = False) -> None:
        """Run the smallest and largest batch and compile, so that requests do not pay for it.

        A text tower computes one text; if the graph was kept, torch and the tower are loaded only
        then. On CUDA every launch size is captured, too, and compared with the uncompiled model.
        OpenVINO compiles for sizes beyond 1 on its own thread.

        Args:
            compile_later: whether `finish_warm_up` will compile while batches are computed, if the
                backend can.

        Raises:
            DeviceError: the model's scores are not finite, or it does not run at all;
                `NewProcessNeeded` if another process may succeed.
        """
        with _device_errors(self.device, self.max_batch):
            largest = min(self.max_batch, self._backend.largest_tried or self.max_batch)
            self._exercise({1, largest})
            self._compiles_later = compile_later and self._backend.compiles_beside
            if not self._compiles_later:
                self._compile()
            if self.checkpoint.embed_texts is not None:
                self.embed_texts(["a picture"])
        self.size = self.meter.size(self.parameters, self.dtype)

    def finish_warm_up(self) -> None:
        """Compile if `warm_up` did not, on a thread that does not call `predict`.

        Raises:
            DeviceError: as `warm_up`.
        """
        if not self._compiles_later:
            return
        self._compiles_later = False
        with _device_errors(self.device, self.max_batch):
            self._compile()
        self.size = self.meter.size(self.parameters, self.dtype)

    def _compile(self) -> None:
        self._backend.compile()
        if self.batch_sizes is not None:
            self._exercise((1,))

    def check(self) -> None:
        """Check that the device still computes, with the smallest batch.

        Raises:
            DeviceError: it does not, or its scores are not finite.
        """
        with _device_errors(self.device, self.max_batch):
            self._exercise((1,))

    def _exercise(self, sizes: Iterable[int]) -> None:
        """Run batches of these sizes; raise NotFinite unless their scores are finite.

        Finite logits are not enough, because a temperature may be too small for them.
        """
        usual = self._backend.usual
        for size in sizes:
            for turn in range(3):
                images = trial_images(self.config, size, turn)
                arrays = self._backend.predict(images, usual[turn % len(usual)])
                best = best_classes_of_graph(arrays) or self.own.best_classes(arrays["logits"], 1)
                if not best.finite.all():
                    raise NotFinite(
                        f"{self.device}: warm-up gave scores that are not finite in {self.dtype}"
                    )

    def predict(
        self, images: Images, requests: RequestedOutputs | Sequence[RequestedOutputs]
    ) -> list[Outputs]:
        """Answer the request for each image of a batch.

        Args:
            images: uint8 [B, H, W, C] with H, W, C the model's input, or B images in a list, which
                saves a copy; 1 <= B <= max_batch.
            requests: one for each image, or the same for all.

        Raises:
            ValueError: wrong shape, too large a batch, another number of requests, or an unknown
                head.
            RuntimeError: from torch (out of memory, a device fault).
        """
        if isinstance(requests, RequestedOutputs):
            requests = [requests] * len(images)
        _check_batch(images, len(requests), self.config, self.max_batch)
        heads = HeadTable(self.own, self.heads)
        is_plain = all(
            requested.is_plain and heads.head(requested.head_name) is self.own
            for requested in requests
        )
        if not is_plain:
            return MixedBatch(images, requests, heads, self._backend, self.config).outputs()
        top_k = max(requested.top_k for requested in requests)
        request = BatchRequest(top_k, logits=self.own.thresholds is not None)
        arrays = self._backend.predict(images, request)
        return self.own.outputs(requests, arrays.get("logits"), best=best_classes_of_graph(arrays))

    def embed_texts(self, texts: Sequence[str]) -> Floats:
        """Return the features of texts, float32 [N, D], computed by the calling thread alone.

        Raises:
            ValueError: the checkpoint has no text tower.
        """
        if self.checkpoint.embed_texts is None:
            raise ValueError(f"{self.checkpoint.name} has no text tower")
        # The tower is a network of torch.
        from model.runtime.torch_pass import one_thread  # noqa: PLC0415

        with one_thread():
            return self.checkpoint.embed_texts(texts)


@contextmanager
def _device_errors(device: str, max_batch: int) -> Iterator[None]:
    """Turn errors of torch in this context into one line."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, getattr(sys.modules.get("torch"), "OutOfMemoryError", ())):
            raise batch_too_large(device, max_batch) from error
        raise DeviceError(f"{device}: the model does not run: {first_line(error)}") from error


def _check_batch(images: Images, requests: int, config: NetworkConfig, max_batch: int) -> None:
    """Raise ValueError unless a batch has the model's input and one request for each image."""
    count = len(images)
    expected = (*config.image_size, config.in_channels)
    are_right = all(image.shape == expected and image.dtype == np.uint8 for image in images)
    if not are_right or not 1 <= count <= max_batch:
        kinds = sorted({(str(image.dtype), image.shape) for image in images})
        raise ValueError(f"{count} images {kinds}: expected uint8 [1...{max_batch}, *{expected}]")
    if requests != count:
        raise ValueError(f"{requests} requests for {count} images")
