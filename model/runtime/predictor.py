"""A model on its device: a batch of uint8 images in, top-k classes and attention maps out.

One thread owns a predictor: it builds it and warms it up. `predict` may then be called by as many
threads at once as there are streams.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import repeat
from time import monotonic
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from model.checkpoint import Checkpoint
from model.config import ViTConfig
from model.errors import DeviceError, NotFinite
from model.explanation.maps import Floats, attention_maps, sharpened_maps
from model.network.vit import VisionTransformer, count_parameters, embedding_name
from model.outputs import (
    CLASS_SPECIFIC,
    AttentionMap,
    EmbeddingRequest,
    MapRequest,
    Outputs,
    Pooling,
    RequestedOutputs,
    faded,
)
from model.runtime.backend import Backend, Images, first_line
from model.runtime.batches import BatchRequest, captured_sizes, launch_size, powers_of_two, sizes_in_use
from model.runtime.choice import BackendName, choose_backend
from model.runtime.compilation import Compilation, CompileMode
from model.runtime.cuda.batch_launcher import DeviceOps
from model.runtime.device import batch_too_large, choose_device, choose_dtype, gpu_identifier
from model.runtime.float8 import CALIBRATION_SET, LEAST_AGREEMENT, agreement, calibration_images
from model.runtime.int8 import Reference, chosen_graph, require_same_model
from model.runtime.postprocess import Postprocess, one_thread
from model.runtime.torch_backend import TorchOptions
from model.runtime.torch_cpu import ThreadPolicy

logger = logging.getLogger(__name__)

_FILL_SECONDS: Final = 2.0
"""How long warm-up may go on after the largest batch: an engine that starts again is waited for."""

_CALIBRATION_BATCH: Final = 16
"""Small: its memory is taken before that of the largest batch."""

_DEFAULT_STREAMS: Final = 2
"""On a GPU, one batch is uploaded, or its answer read, while the other computes."""

_LEAST_NORM: Final = 1e-12
"""What an embedding is divided by at least, as in torch's `normalize`."""

DEFAULT_MAX_BATCH: Final = {"cpu": 32, "cuda": 64}
"""Largest batch where none is chosen; on a GPU, `benchmarks.gpu` measures which one is best."""

_DEFAULT_THREADS: Final = {"cpu": None, "cuda": 1}
"""Torch's threads on the CPU; beside a GPU there is little for them to do, and they would take cores from decoders."""


class Predictor:
    """Owns device, dtype, backend and warm-up of one model.

    Args:
        checkpoint: what to serve.
        device: see `model.runtime.device.choose_device`.
        device_name: what the device is called, where it has another number in this process.
        dtype: see `model.runtime.device.choose_dtype`. Where `auto` gives float16, and the model overflows in it, the
            model runs in float32. With `float8` the best class is compared with bfloat16's on a calibration set. A
            checkpoint that has a graph in int8 beside it is served with it in `auto`, too, where it agrees.
        least_agreement: share of that set on which they must agree, 0...1; with int8, of the pictures on which
            `vitserve convert` measured it.
        compile_mode: `auto` compiles on CUDA; `on` also on the CPU; `max` times several kernels for every
            matrix product first, which takes minutes. If the compiler is missing or fails, that is logged and shown by
            `compiled`, and the model runs uncompiled. Unless `off`, on CUDA each launch size becomes a CUDA graph.
        backend: what runs the network: `torch`; `openvino`, on a CPU; or `auto`, which is OpenVINO where it is
            installed, has the dtype and agrees with torch, unless torch is to compile.
        max_batch: largest batch ever launched; None for the device's default.
        threads: threads that compute on the CPU; None leaves torch's choice.
        streams: batches under way at the same time; None for the device's default.
        graphs: whether launch sizes become CUDA graphs, where they do.
        launch_sizes: the batch sizes to compile for, instead of powers of two, or finer ones on CUDA; the largest is
            `max_batch`.
        ops: a device that batches are launched on in CUDA's place; for tests.

    Attributes:
        device: name of the device: `cpu` or `cuda:N`.
        dtype: what it computes in.
        agreement: how often float8 gives bfloat16's best class, or int8 float32's, and on what; None in other dtypes.
        gpu_uuid: identifier of the GPU, whatever its number; None on the CPU.
        backend: what runs the network, with its version; attention of other layers than the last is always torch's.

    Raises:
        DeviceError: the device, dtype or backend is not available here, or float8 or int8 agrees too seldom.
        CheckpointError: the weights are not what the config says, or the files of the graph in int8 are not its.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        device: str = "auto",
        device_name: str | None = None,
        dtype: str = "auto",
        least_agreement: float = LEAST_AGREEMENT,
        compile_mode: CompileMode = "auto",
        backend: BackendName = "auto",
        max_batch: int | None = None,
        threads: int | None = None,
        streams: int | None = None,
        launch_sizes: Sequence[int] | None = None,
        graphs: bool = True,
        ops: DeviceOps | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self.config = checkpoint.config
        if dtype == "float8" and not isinstance(checkpoint.config, ViTConfig):
            raise DeviceError(f"dtype 'float8': {checkpoint.config.kind} has no blocks for it: choose bfloat16")
        torch_device = choose_device(device)
        torch_dtype = choose_dtype(dtype, torch_device)
        on_cpu = torch_device.type == "cpu"
        self.device = device_name or str(torch_device)
        self.gpu_uuid = None if on_cpu else gpu_identifier(torch_device)
        sizes_up_to = powers_of_two if on_cpu and ops is None else captured_sizes
        sizes = tuple(sorted(launch_sizes or sizes_up_to(max_batch or DEFAULT_MAX_BATCH[torch_device.type])))
        self.max_batch = sizes[-1]
        policy = ThreadPolicy(threads or _DEFAULT_THREADS[torch_device.type])
        self.streams = streams or (min(_DEFAULT_STREAMS, policy.count) if on_cpu else _DEFAULT_STREAMS)

        self.agreement: str | None = None
        self._postprocess = Postprocess(checkpoint)
        int8 = chosen_graph(checkpoint, torch_device, dtype, backend, compile_mode, least_agreement)

        def build(torch_dtype: torch.dtype) -> tuple[Backend, str]:
            model = checkpoint.network()
            options = TorchOptions(
                model, checkpoint, torch_device, torch_dtype, compile_mode, sizes, graphs, float8=dtype == "float8"
            )
            self.parameters, self.dtype = count_parameters(model), options.dtype_name
            graph = None if int8 is None else int8.graph
            chosen = choose_backend(options, backend, threads=policy, streams=self.streams, ops=ops, int8=graph)
            if options.float8 and isinstance(model, VisionTransformer):
                self.agreement = self._require_agreement(model, chosen[0], least_agreement)
            if int8 is not None:
                self.agreement, self.dtype = int8.agreement, "int8"
            return chosen

        self._backend, self.backend_reason = build(torch_dtype)
        # A library's network may do without a dtype, a Vision Transformer overflow in float16.
        risks = (torch.float16,) if isinstance(checkpoint.config, ViTConfig) else (torch.float16, torch.bfloat16)
        if dtype == "auto" and torch_dtype in risks:
            try:
                self.check()
            except DeviceError as error:
                if isinstance(checkpoint.config, ViTConfig) and not isinstance(error, NotFinite):
                    raise
                logger.warning("%s: computing in float32 instead", error)
                self._backend, self.backend_reason = build(torch.float32)
        self.backend = self._backend.name
        self._reference = None if int8 is None else Reference(checkpoint)
        if self._reference is not None:
            require_same_model(checkpoint, self.logits, self._reference)

    def _require_agreement(self, model: VisionTransformer, backend: Backend, least: float) -> str:
        """Return how often the model in float8 gives bfloat16's best class.

        Raises:
            DeviceError: too seldom, or the model does not run, or has no classes.
        """
        if not self.checkpoint.config.num_classes:
            raise DeviceError(
                "dtype 'float8': it is checked by the best class, and the model has none: choose bfloat16"
            )
        images = calibration_images(self.checkpoint.preprocess)
        with self._device_errors(), torch.inference_mode():
            share = agreement(model, backend.logits, images, batch=min(self.max_batch, _CALIBRATION_BATCH))
        text = f"bfloat16's best class on {share:.1%} of {CALIBRATION_SET}"
        if share < least:
            raise DeviceError(f"dtype 'float8': it gives {text}, and {least:.1%} are required: choose bfloat16")
        logger.info("float8 gives %s", text)
        return text

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

    def launch_size(self, count: int) -> int:
        """Return the size that a batch of `count` images is launched at."""
        return launch_size(count, self._backend.batch_sizes)

    def warm_up(self) -> None:
        """Run the model once at its smallest and largest batch, so that no request pays for allocations.

        On the CPU it is run at the other sizes too, largest first, while that takes no more than two seconds, so that
        the memory that a library keeps for each size is taken before the first request and not at some later one.
        On CUDA the model is compiled here, captured for every launch size, and compared with the uncompiled one. On the
        CPU it is compiled on a thread of its own while the uncompiled model already answers, and takes over when done.

        Raises:
            DeviceError: the model gives scores that are not finite, or does not run at all.
            `NewProcessNeeded` where this process cannot go on, and another one may: see there.
        """
        with self._device_errors():
            self._backend.exercise((1, self.max_batch))
            self._require_finite_scores()
            self._fill_caches()
            self._backend.compile()

    def _require_finite_scores(self) -> None:
        """Raise NotFinite unless black, white and noise have finite scores, as requests get them: a temperature may
        be too small for logits that are finite.
        """
        shape = (*self.config.image_size, self.config.in_channels)
        noise = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
        for name, image in (("black", np.zeros_like(noise)), ("white", np.full_like(noise, 255)), ("noise", noise)):
            [outputs] = self.predict(image[np.newaxis], RequestedOutputs(1))
            if not outputs.finite:
                raise NotFinite(f"{self.device}: warm-up gave scores of {name} that are not finite in {self.dtype}")

    def _fill_caches(self) -> None:
        end = monotonic() + _FILL_SECONDS
        for size in sizes_in_use(self.max_batch):
            if monotonic() >= end:
                logger.info("batches of %d and less are not tried before the first request: it takes too long", size)
                break
            self._backend.fill_caches(size)

    def check(self) -> None:
        """Check that the device still computes, by running the smallest batch.

        Raises:
            DeviceError: it does not, or gives scores that are not finite.
        """
        with self._device_errors():
            self._backend.exercise((1,))
            self._require_finite_scores()

    @contextmanager
    def _device_errors(self) -> Iterator[None]:
        """Turn what torch raises in this context into one line."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise batch_too_large(self.device, self.max_batch) from error
        except RuntimeError as error:
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
        with torch.inference_mode():
            tensors = self._backend.predict(images, request).tensors()
            scores, indices, finite = (tensors[name].numpy() for name in ("scores", "indices", "finite"))
            logits = tensors["logits"].float().numpy() if request.logits else None
            embeddings = {name: tensors[name].float().numpy() for name in request.embeddings}
            maps = self._maps_of_pass(tensors, request, requests)
        maps |= self._maps_of_own_pass(images, requests, tensors)
        return [
            Outputs(
                scores=scores[place, : each.top_k],
                indices=indices[place, : each.top_k],
                map=maps.get(place),
                logits=None if logits is None or not each.logits else logits[place],
                embedding=None if each.embedding is None else self._embedding(embeddings, each.embedding, place),
                finite=bool(finite[place]),
            )
            for place, each in enumerate(requests)
        ]

    def _check_batch(self, images: Images, requests: int) -> None:
        count = len(images)
        expected = (*self.config.image_size, self.config.in_channels)
        kinds = {(str(image.dtype), image.shape) for image in images}
        if kinds - {("uint8", expected)} or not 1 <= count <= self.max_batch:
            raise ValueError(f"{count} images {sorted(kinds)}: expected uint8 [1...{self.max_batch}, *{expected}]")
        if requests != count:
            raise ValueError(f"{requests} requests for {count} images")

    def _embedding(
        self, embeddings: Mapping[Pooling, NDArray[np.float32]], request: EmbeddingRequest, place: int
    ) -> NDArray[np.float32]:
        """Return what is asked for of the embeddings of a batch: [D], in memory of its own."""
        embedding: NDArray[np.float32] = embeddings[embedding_name(self.config, request.pool)][place].copy()
        if request.normalize:
            embedding /= max(float(np.linalg.norm(embedding)), _LEAST_NORM)
        return embedding

    def _maps_of_pass(
        self, tensors: Mapping[str, Tensor], request: BatchRequest, requests: Sequence[RequestedOutputs]
    ) -> dict[int, AttentionMap]:
        """Return the maps that come out of the classification's pass, by the places of their images."""
        maps: dict[int, AttentionMap] = {}
        if not isinstance(self.config, ViTConfig):
            return maps
        if request.layers:
            maps = attention_maps(tensors["attention"], request.layers, [each.map for each in requests], self.config)
        if request.relevance:
            places = [place for place, each in enumerate(requests) if each.map is not None and each.map.of_best_class]
            values, kept_mass = sharpened_maps(tensors["relevance"].numpy()[places], self.config)
            classes = tensors["indices"][places, 0]
            maps |= self._of_classes(places, MapRequest("relevance"), classes, values, kept_mass, tensors)
        return maps

    def _maps_of_own_pass(
        self, images: Images, requests: Sequence[RequestedOutputs], tensors: Mapping[str, Tensor]
    ) -> dict[int, AttentionMap]:
        """Return the maps that need passes of their own, each of its request's class or of the best one.

        A map of a direction is of no class of the model: who asked for it knows the score, the evidence and the label.
        """
        passes: dict[tuple[MapRequest, bool], list[int]] = {}
        directions: dict[int, Floats] = {}
        classes = tensors["indices"][:, 0].clone()
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
            targets = np.stack([directions[place] for place in places]) if is_directed else labels.numpy()
            values, kept_mass = (part.numpy() for part in self._backend.explain(pixels, targets, request))
            if request.method in CLASS_SPECIFIC and not is_directed:
                maps |= self._of_classes(places, request, labels, values, kept_mass, tensors)
            else:
                maps |= dict(zip(places, map(AttentionMap, repeat(request), values, kept_mass.tolist()), strict=True))
        return maps

    def _of_classes(
        self,
        places: Sequence[int],
        request: MapRequest,
        classes: Tensor,
        values: Floats,
        kept_mass: Floats,
        tensors: Mapping[str, Tensor],
    ) -> dict[int, AttentionMap]:
        """Return maps [B, rows, columns] of these classes, int64 [B], faded by their evidence, by the images' places.

        Args:
            tensors: of the batch; without logits, the classes are the best ones.
        """
        postprocess, logits = self._postprocess, tensors.get("logits")
        if logits is None:
            score = tensors["scores"][places, 0]
            evidence = postprocess.best_evidence(score)
        else:
            score, evidence = postprocess.evidence(logits[places], classes)
        requests = (replace(request, class_index=label) for label in classes.tolist())
        shown = faded(values, evidence.numpy())
        facts = kept_mass.tolist(), score.tolist(), evidence.tolist()
        return dict(zip(places, map(AttentionMap, requests, shown, *facts), strict=True))

    @property
    def audits(self) -> bool:
        """Return whether `reference_class` says more than `predict` does."""
        return self._reference is not None

    def reference_class(self, image: NDArray[np.uint8]) -> int:
        """Return the best class of one image in float32, uint8 [H, W, C], computed by the calling thread alone."""
        assert self._reference is not None, "see `audits`"
        return int(self._reference.logits(image[np.newaxis]).argmax())

    def embed_texts(self, texts: Sequence[str]) -> Floats:
        """Return the features of texts, float32 [N, D], computed by the calling thread alone.

        Raises:
            ValueError: the checkpoint has no text tower.
        """
        if self.checkpoint.embed_texts is None:
            raise ValueError(f"{self.checkpoint.name} has no text tower")
        with one_thread(torch.device("cpu")):
            return self.checkpoint.embed_texts(texts)

    @torch.inference_mode()
    def logits(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return raw logits, before the temperature: float32 [B, num_classes]; for parity tests and calibration."""
        logits: NDArray[np.float32] = self._backend.logits(images).float().cpu().numpy()
        return logits
