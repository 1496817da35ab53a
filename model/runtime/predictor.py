"""A model on its device: a batch of uint8 images in, top-k classes and attention maps out.

One thread owns a predictor: it builds it and warms it up. `predict` may then be called by as many
threads at once as there are streams.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import repeat
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
from numpy.typing import NDArray

from model.calibration import LabelSets, label_sets_of
from model.config import ViTConfig
from model.errors import DeviceError, NotFinite, first_line
from model.explanation.maps import attention_maps, sharpened_maps
from model.heads import Floats, own_head
from model.outputs import (
    CLASS_SPECIFIC,
    AttentionMap,
    EmbeddingRequest,
    MapRequest,
    Outputs,
    RequestedOutputs,
    embedding_name,
)
from model.runtime.backend import BatchRequest, Compilation, Images, Parts, batch_too_large, launch_size, trial_images

if TYPE_CHECKING:
    from model.checkpoint import Checkpoint
    from model.runtime.build import PredictorOptions
    from model.runtime.openvino.kept import KeptCheckpoint

logger = logging.getLogger(__name__)


class Predictor:
    """Owns device, dtype, backend and warm-up of one model.

    Args:
        checkpoint: what to serve.
        device: see `model.runtime.device.choose_device`.
        device_name: what the device is called, where it has another number in this process.
        dtype: see `model.runtime.device.choose_dtype`. Where `auto` gives float16, and the model overflows in it, the
            model runs in float32.
        compile_mode: `auto` is OpenVINO on a CPU where it is installed, has the dtype and agrees with torch, and
            compiles on CUDA; `on` compiles on a CPU, too; `off` is plain torch. If the compiler is missing or fails,
            that is logged and shown by `compiled`, and the model runs uncompiled. Unless `off`, on CUDA each
            launch size becomes a CUDA graph.
        max_batch: largest batch ever launched; None for the device's default.
        threads: threads that compute on the CPU; None: as `compute_threads` says, and one beside a GPU.
        streams: batches under way at the same time; None for the device's default.
        graphs: whether launch sizes become CUDA graphs, where they do.
        launch_sizes: the batch sizes to compile for, instead of powers of two, or finer ones on CUDA; the largest is
            `max_batch`.
        ops: a device that batches are launched on in CUDA's place; for tests.
        keep: keeps the graphs of OpenVINO for a later start; None keeps none.
        parts: what it is made of, instead of what the options say.

    Attributes:
        checkpoint: what is served; without tensors where its graphs were kept: see `KeptCheckpoint`.
        device: name of the device: `cpu` or `cuda:N`.
        dtype: what it computes in.
        gpu_uuid: identifier of the GPU, whatever its number; None on the CPU.
        backend: what runs the network, with its version; attention of other layers than the last is always torch's.

    Raises:
        DeviceError: the device or dtype is not available here.
        CheckpointError: the weights are not what the config says.
    """

    def __init__(
        self, checkpoint: Checkpoint | KeptCheckpoint, parts: Parts | None = None, **options: Unpack[PredictorOptions]
    ) -> None:
        self.checkpoint, self.config = checkpoint, checkpoint.config
        self._head = own_head(
            checkpoint.config, checkpoint.labels, checkpoint.temperature, checkpoint.multi_label, checkpoint.form
        )
        if parts is not None:
            self._take(parts)
            return
        from model.checkpoint import Checkpoint  # noqa: PLC0415  torch takes a second to import
        from model.runtime.build import build, may_overflow  # noqa: PLC0415

        assert isinstance(checkpoint, Checkpoint), "what is kept of one comes with parts"
        self._take(build(checkpoint, options))
        if may_overflow(checkpoint, self._parts, options):
            try:
                self.check()
            except DeviceError as error:
                if isinstance(checkpoint.config, ViTConfig) and not isinstance(error, NotFinite):
                    raise
                logger.warning("%s: computing in float32 instead", error)
                self._take(build(checkpoint, {**options, "dtype": "float32"}))

    def _take(self, parts: Parts) -> None:
        self._parts, self._backend = parts, parts.backend
        self.device, self.dtype, self.gpu_uuid = parts.device, parts.dtype, parts.gpu_uuid
        self.parameters, self.max_batch, self.streams = parts.parameters, parts.max_batch, parts.streams
        self.backend, self.backend_reason = parts.backend.name, parts.reason

    coverage: float | None = None
    _label_sets: LabelSets | None = None

    def set_coverage(self, coverage: float) -> None:
        """Give images that ask for them sets of labels of this coverage; raises `CheckpointError` where it cannot."""
        self._label_sets = label_sets_of(self.checkpoint.calibration, coverage, self.checkpoint.source)
        self.coverage = coverage

    @property
    def calibrated_on(self) -> int | None:
        """Return how many pictures sets of labels are made by, or None where the checkpoint was not calibrated."""
        calibration = self.checkpoint.calibration
        return None if calibration is None else len(calibration.scores)

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
        """Return the sizes launched when compiled (smaller batches are padded up); None: any up to `max_batch`."""
        return self._backend.batch_sizes

    def defers(self, requested: RequestedOutputs) -> bool:
        """Return whether an image's outputs take something that is loaded only then, for a second or two."""
        if requested.map is None and requested.embedding is None:
            return False
        return self._backend.defers(BatchRequest.of([requested], self.config))

    def launch_size(self, count: int) -> int:
        """Return the size that a batch of `count` images is launched at."""
        return launch_size(count, self._backend.batch_sizes)

    def warm_up(self) -> None:
        """Run the model at its smallest and largest batch, so that no request pays for allocations, and compile it.

        A text tower computes a text: where the graph was kept, torch and the tower are loaded only now.

        On CUDA the model is captured for every launch size, too, and compared with the uncompiled one. OpenVINO
        compiles for the sizes beyond 1 on a thread of its own.

        Raises:
            DeviceError: the model gives scores that are not finite, or does not run at all.
            `NewProcessNeeded` where this process cannot go on, and another one may: see there.
        """
        with self._device_errors():
            self._exercise({1, min(self.max_batch, self._backend.largest_tried or self.max_batch)})
            self._backend.compile()
            if self.batch_sizes is not None:
                self._exercise((1,))
            if self.checkpoint.embed_texts is not None:
                self.embed_texts(["a picture"])

    def check(self) -> None:
        """Check that the device still computes, by running the smallest batch.

        Raises:
            DeviceError: it does not, or gives scores that are not finite.
        """
        with self._device_errors():
            self._exercise((1,))

    def _exercise(self, sizes: Iterable[int]) -> None:
        """Raise NotFinite unless noise, black and white have finite scores, as requests get them: a temperature may
        be too small for logits that are finite.
        """
        for size in sizes:
            for turn in range(3):
                request = self._backend.usual[turn % len(self._backend.usual)]
                if not self._backend.predict(trial_images(self.config, size, turn), request).tensors()["finite"].all():
                    raise NotFinite(f"{self.device}: warm-up gave scores that are not finite in {self.dtype}")

    @contextmanager
    def _device_errors(self) -> Iterator[None]:
        """Turn what torch raises in this context into one line."""
        try:
            yield
        except RuntimeError as error:
            torch = sys.modules.get("torch")
            if torch is not None and isinstance(error, torch.OutOfMemoryError):
                raise batch_too_large(self.device, self.max_batch) from error
            raise DeviceError(f"{self.device}: the model does not run: {first_line(error)}") from error

    def predict(self, images: Images, requests: RequestedOutputs | Sequence[RequestedOutputs]) -> list[Outputs]:
        """Return what is asked of each image of a batch.

        Args:
            images: uint8 [B, H, W, C] with H, W, C the model's input, or B images in a list, which are copied once
                less; 1 <= B <= max_batch.
            requests: one for each image, or the same for all.

        Raises:
            ValueError: wrong shape, too large a batch, or another number of requests.
            RuntimeError: as torch raises it (out of memory, a device fault).
        """
        requests = [requests] * len(images) if isinstance(requests, RequestedOutputs) else requests
        self._check_batch(images, len(requests))
        request = BatchRequest.of(requests, self.config)
        kinds = self._kinds(request, requests)
        if len(kinds) > 1:
            found: dict[int, Outputs] = {}
            for places in kinds:
                of_kind = self.predict([images[place] for place in places], [requests[place] for place in places])
                found.update(zip(places, of_kind, strict=True))
            return [found[place] for place in range(len(images))]
        arrays = self._backend.predict(images, request).tensors()
        scores, indices, finite = (arrays[name] for name in ("scores", "indices", "finite"))
        logits = arrays["logits"] if request.logits else None
        with_set = [place for place, each in enumerate(requests) if each.label_set]
        sets: dict[int, NDArray[np.int64]] = {}
        if self._label_sets is not None and logits is not None and with_set:
            sets = dict(zip(with_set, self._label_sets(logits[with_set]), strict=True))
        maps = self._maps_of_pass(arrays, request, requests)
        maps |= self._maps_of_own_pass(images, requests, arrays)
        return [
            Outputs(
                scores=scores[place, : each.top_k],
                indices=indices[place, : each.top_k],
                map=maps.get(place),
                logits=None if logits is None or not each.logits else logits[place],
                embedding=None if each.embedding is None else self._embedding(arrays, each.embedding, place),
                finite=bool(finite[place]),
                label_set=sets.get(place),
            )
            for place, each in enumerate(requests)
        ]

    def _kinds(self, request: BatchRequest, requests: Sequence[RequestedOutputs]) -> list[list[int]]:
        """Return the places of the images of each kind, where no graph computes all that a batch asks for; else none.

        Each kind is then launched by itself, with its graph where it has one.
        """
        if self.batch_sizes is None or request.of_network in self._backend.usual:
            return []
        kinds: dict[BatchRequest, list[int]] = {}
        for place, each in enumerate(requests):
            kinds.setdefault(BatchRequest.of([each], self.config).of_network, []).append(place)
        return list(kinds.values())

    def _check_batch(self, images: Images, requests: int) -> None:
        count = len(images)
        expected = (*self.config.image_size, self.config.in_channels)
        kinds = {(str(image.dtype), image.shape) for image in images}
        if kinds - {("uint8", expected)} or not 1 <= count <= self.max_batch:
            raise ValueError(f"{count} images {sorted(kinds)}: expected uint8 [1...{self.max_batch}, *{expected}]")
        if requests != count:
            raise ValueError(f"{requests} requests for {count} images")

    def _embedding(
        self, arrays: Mapping[str, NDArray[Any]], request: EmbeddingRequest, place: int
    ) -> NDArray[np.float32]:
        """Return what is asked for of the embeddings of a batch: [D], in memory of its own."""
        embedding: Floats = arrays[embedding_name(self.config, request.pool)][place].copy()
        if request.normalize:
            # What an embedding is divided by at least, as in torch's `normalize`.
            embedding /= max(float(np.linalg.norm(embedding)), 1e-12)
        return embedding

    def _maps_of_pass(
        self, arrays: Mapping[str, NDArray[Any]], request: BatchRequest, requests: Sequence[RequestedOutputs]
    ) -> dict[int, AttentionMap]:
        """Return the maps that come out of the classification's pass, by the places of their images."""
        maps: dict[int, AttentionMap] = {}
        if not isinstance(self.config, ViTConfig):
            return maps
        if request.layers:
            maps = attention_maps(arrays["attention"], request.layers, [each.map for each in requests], self.config)
        if request.relevance:
            places = [place for place, each in enumerate(requests) if each.map is not None and each.map.of_best_class]
            values, kept_mass = sharpened_maps(arrays["relevance"][places], self.config)
            classes = arrays["indices"][places, 0]
            maps |= self._of_classes(places, MapRequest("relevance"), classes, values, kept_mass, arrays)
        return maps

    def _maps_of_own_pass(
        self, images: Images, requests: Sequence[RequestedOutputs], arrays: Mapping[str, NDArray[Any]]
    ) -> dict[int, AttentionMap]:
        """Return the maps that need passes of their own, each of its request's class or of the best one.

        A map of a direction is of no class of the model: who asked for it knows the score, the evidence and the label.
        """
        passes: dict[tuple[MapRequest, bool], list[int]] = {}
        directions: dict[int, Floats] = {}
        classes = arrays["indices"][:, 0].copy()
        for place, each in enumerate(requests):
            if each.map is not None and each.map.needs_pass:
                if each.map.class_index is not None:
                    classes[place] = each.map.class_index
                if each.map.direction is not None:
                    directions[place] = each.map.direction
                request = replace(each.map, class_index=None, direction=None)
                passes.setdefault((request, place in directions), []).append(place)
        maps: dict[int, AttentionMap] = {}
        for (request, is_directed), places in passes.items():
            pixels, labels = np.stack([images[place] for place in places]), classes[places]
            targets = np.stack([directions[place] for place in places]) if is_directed else labels
            values, kept_mass = self._backend.explain(pixels, targets, request)
            if request.method in CLASS_SPECIFIC and not is_directed:
                maps |= self._of_classes(places, request, labels, values, kept_mass, arrays)
            else:
                maps |= dict(zip(places, map(AttentionMap, repeat(request), values, kept_mass.tolist()), strict=True))
        return maps

    def _of_classes(
        self,
        places: Sequence[int],
        request: MapRequest,
        classes: NDArray[np.int64],
        values: Floats,
        kept_mass: Floats,
        arrays: Mapping[str, NDArray[Any]],
    ) -> dict[int, AttentionMap]:
        """Return maps [B, rows, columns] of these classes, int64 [B], with their evidence, by the images' places.

        Args:
            arrays: of the batch, with logits.
        """
        score, evidence = self._head.evidence(arrays["logits"][places], classes)
        requests = (replace(request, class_index=label) for label in classes.tolist())
        facts = kept_mass.tolist(), score.tolist(), evidence.tolist()
        return dict(zip(places, map(AttentionMap, requests, values, *facts), strict=True))

    def embed_texts(self, texts: Sequence[str]) -> Floats:
        """Return the features of texts, float32 [N, D], computed by the calling thread alone.

        Raises:
            ValueError: the checkpoint has no text tower.
        """
        if self.checkpoint.embed_texts is None:
            raise ValueError(f"{self.checkpoint.name} has no text tower")
        import torch  # noqa: PLC0415  of which the tower is

        from model.runtime.torch_pass import one_thread  # noqa: PLC0415

        with one_thread(torch.device("cpu")):
            return self.checkpoint.embed_texts(texts)

    def logits(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return raw logits, before the temperature: float32 [B, num_classes]; for parity tests and calibration."""
        logits: Floats = self._backend.predict(images, BatchRequest(logits=True)).tensors()["logits"]
        return logits
