"""A model on its device: a batch of uint8 images in, top-k classes and attention maps out.

One thread owns a predictor: it builds it and warms it up. `predict` may then be called by as many
threads at once as there are streams.
"""

import logging
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
from numpy.typing import NDArray

from model.calibration import label_sets_of
from model.config import ViTConfig
from model.description import Description
from model.errors import DeviceError, NotFinite, first_line
from model.explanation.maps import attention_maps, sharpened_maps
from model.features import Floats
from model.heads import Head
from model.outputs import (
    AttentionMap,
    EmbeddingRequest,
    MapRequest,
    Outputs,
    Pooling,
    RequestedOutputs,
)
from model.runtime.backend import (
    SIZES,
    Aim,
    BatchRequest,
    Compilation,
    Images,
    Parts,
    batch_too_large,
    launch_size,
    trial_images,
)
from model.runtime.memory import Meter

if TYPE_CHECKING:
    from model.runtime.build import PredictorOptions

logger = logging.getLogger(__name__)

# Gives the class of a map, and what it begins with, by an image's features, [D]: `Head.target`.
_Target = Callable[[Floats], tuple[int, Floats]]


class Predictor:
    """Owns device, dtype, backend and warm-up of one model.

    Args:
        checkpoint: what to serve.
        device: see `model.runtime.device.choose_device`.
        device_name: what the device is called, where it has another number in this process.
        dtype: see `model.runtime.device.choose_dtype`. Where `auto` gives float16, and the model
            overflows in it, the model runs in float32.
        compile_mode: `auto` is OpenVINO on a CPU where it is installed, has the dtype and agrees
            with torch, and compiles on CUDA; `on` compiles on a CPU, too; `off` is plain torch. If
            the compiler is missing or fails, that is logged and shown by `compiled`, and the model
            runs uncompiled. Unless `off`, on CUDA each launch size becomes a CUDA graph.
        max_batch: largest batch ever launched; None for the device's default.
        threads: threads that compute on the CPU; None: as `compute_threads` says, and one beside a
        GPU.
        streams: batches under way at the same time; None for the device's default.
        graphs: whether launch sizes become CUDA graphs, where they do.
        transfer: whether transfer features have graphs too; without them they are computed
        uncompiled on CUDA.
        launch_sizes: the batch sizes to compile for, instead of powers of two, or finer ones on
            CUDA; the largest is `max_batch`.
        ops: a device that batches are launched on in CUDA's place; for tests.
        keep: keeps the graphs of OpenVINO for a later start; None keeps none.
        parts: what it is made of, instead of what the options say.

    Attributes:
        checkpoint: what is served; without tensors where its graphs were kept.
        device: name of the device: `cpu` or `cuda:N`.
        dtype: what it computes in.
        gpu_uuid: identifier of the GPU, whatever its number; None on the CPU.
        backend: what runs the network, with its version; attention of other layers than the last is
        always torch's.
        size: bytes of its tensors; on a GPU those allocated from its making to the end of its
        warm-up, if more.
        own: the head whose logits the network's pass gives.
        heads: all heads of the backbone by the names that requests have; without a name a request
        is to the own one.

    Raises:
        DeviceError: the device or dtype is not available here.
        CheckpointError: the weights are not what the config says.
    """

    def __init__(
        self,
        checkpoint: Description,
        parts: Parts | None = None,
        **options: "Unpack[PredictorOptions]",
    ) -> None:
        self.checkpoint, self.config = checkpoint, checkpoint.config
        self.own = checkpoint.head
        self.heads: dict[str, Head] = {}
        self.meter, self.size = Meter(), 0
        self._compiles_later = False
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
        self.parameters, self.max_batch, self.streams = (
            parts.parameters,
            parts.max_batch,
            parts.streams,
        )
        self.backend, self.backend_reason = parts.backend.name, parts.reason

    coverage: float | None = None

    def set_coverage(self, coverage: float) -> None:
        """Give images that ask for them sets of labels of this coverage; raises `CheckpointError`
        where it cannot.
        """
        sets = label_sets_of(self.checkpoint.calibration, coverage, self.checkpoint.source)
        self.own, self.coverage = replace(self.own, label_sets=sets), coverage

    @property
    def calibrated_on(self) -> int | None:
        """Return how many pictures sets of labels are made by, or None where the checkpoint was not
        calibrated.
        """
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
        """Return the sizes launched when compiled (smaller batches are padded up); None: any up to
        `max_batch`.
        """
        return self._backend.batch_sizes

    def defers(self, requested: RequestedOutputs) -> bool:
        """Return whether an image's outputs take torch's own pass, or what is loaded only then, for
        a second or two.
        """
        if any(each.map is not None and self._aim(each) is not None for each in requested.each):
            return True
        if all(each.map is None and each.embedding is None for each in requested.each):
            return False
        return self._backend.defers(self._batch_request([requested], self._has_others([requested])))

    def launch_size(self, count: int) -> int:
        """Return the size that a batch of `count` images is launched at."""
        return launch_size(count, self._backend.batch_sizes)

    def warm_up(self, *, compile_later: bool = False) -> None:
        """Run the model at its smallest and largest batch, so that no request pays for allocations,
        and compile it.

        A text tower computes a text: where the graph was kept, torch and the tower are loaded only
        now.

        On CUDA the model is captured for every launch size, too, and compared with the uncompiled
        one. OpenVINO compiles for the sizes beyond 1 on a thread of its own.

        Args:
            compile_later: whether `finish_warm_up` is called beside the batches, and compiles then
            where it can.

        Raises:
            DeviceError: the model gives scores that are not finite, or does not run at all.
            `NewProcessNeeded` where this process cannot go on, and another one may: see there.
        """
        with self._device_errors():
            self._exercise({1, min(self.max_batch, self._backend.largest_tried or self.max_batch)})
            self._compiles_later = compile_later and self._backend.compiles_beside
            if not self._compiles_later:
                self._compile()
            if self.checkpoint.embed_texts is not None:
                self.embed_texts(["a picture"])
        self.size = self.meter.size(self.parameters, self.dtype)

    def finish_warm_up(self) -> None:
        """Compile what `warm_up` has left, on a thread beside those that call `predict`; raises as
        `warm_up`.
        """
        if not self._compiles_later:
            return
        self._compiles_later = False
        with self._device_errors():
            self._compile()
        self.size = self.meter.size(self.parameters, self.dtype)

    def _compile(self) -> None:
        self._backend.compile()
        if self.batch_sizes is not None:
            self._exercise((1,))

    def check(self) -> None:
        """Check that the device still computes, by running the smallest batch.

        Raises:
            DeviceError: it does not, or gives scores that are not finite.
        """
        with self._device_errors():
            self._exercise((1,))

    def _exercise(self, sizes: Iterable[int]) -> None:
        """Raise NotFinite unless noise, black and white have finite scores, as requests get them: a
        temperature may be too small for logits that are finite.
        """
        for size in sizes:
            for turn in range(3):
                request = self._backend.usual[turn % len(self._backend.usual)]
                if (
                    not self._backend.predict(trial_images(self.config, size, turn), request)
                    .tensors()["finite"]
                    .all()
                ):
                    raise NotFinite(
                        f"{self.device}: warm-up gave scores that are not finite in {self.dtype}"
                    )

    @contextmanager
    def _device_errors(self) -> Iterator[None]:
        """Turn what torch raises in this context into one line."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, getattr(sys.modules.get("torch"), "OutOfMemoryError", ())):
                raise batch_too_large(self.device, self.max_batch) from error
            raise DeviceError(
                f"{self.device}: the model does not run: {first_line(error)}"
            ) from error

    def predict(
        self, images: Images, requests: RequestedOutputs | Sequence[RequestedOutputs]
    ) -> list[Outputs]:
        """Return what is asked of each image of a batch.

        Args:
            images: uint8 [B, H, W, C] with H, W, C the model's input, or B images in a list, which
                are copied once less; 1 <= B <= max_batch.
            requests: one for each image, or the same for all.

        Raises:
            ValueError: wrong shape, too large a batch, or another number of requests.
            RuntimeError: as torch raises it (out of memory, a device fault).
        """
        requests = [requests] * len(images) if isinstance(requests, RequestedOutputs) else requests
        self._check_batch(images, len(requests))
        if all(each.is_plain for each in requests):
            return self._plain(images, requests)
        has_others = self._has_others(requests)
        request = self._batch_request(requests, has_others)
        flat = [(place, each) for place, asked in enumerate(requests) for each in asked.each]
        aims = {
            number: (place, *aim)
            for number, (place, each) in enumerate(flat)
            if (aim := self._aim(each))
        }
        kinds = self._kinds(request, requests, {place for place, *_ in aims.values()})
        if len(kinds) > 1:
            found: dict[int, Outputs] = {}
            for places in kinds:
                of_kind = self.predict(
                    [images[place] for place in places], [requests[place] for place in places]
                )
                found.update(zip(places, of_kind, strict=True))
            return [found[place] for place in range(len(images))]
        arrays, aimed = self._compute(images, request, aims)
        if not has_others:
            return self._outputs(images, request, requests, arrays, self.own, aimed)
        by_head: dict[str, list[int]] = {}
        for number, (_, each) in enumerate(flat):
            by_head.setdefault(each.head, []).append(number)
        outputs: dict[int, Outputs] = {}
        for name, numbers in by_head.items():
            places, asked = (
                [flat[number][0] for number in numbers],
                [flat[number][1] for number in numbers],
            )
            of_head = {key: values[places] for key, values in arrays.items()}
            head = self._head(name)
            if head is not self.own:
                logits = head.logits(of_head[head.features])
                best = head.best(logits, max(each.top_k for each in asked))
                of_head |= {"logits": logits, **best._asdict()}
            of_head_images = [images[place] for place in places]
            maps = {at: aimed[number] for at, number in enumerate(numbers) if number in aimed}
            outputs |= zip(
                numbers,
                self._outputs(of_head_images, request, asked, of_head, head, maps),
                strict=True,
            )
        ordered = iter(outputs[number] for number in range(len(flat)))
        return [
            replace(next(ordered), more=tuple(islice(ordered, len(each.more)))) for each in requests
        ]

    def _plain(self, images: Images, requests: Sequence[RequestedOutputs]) -> list[Outputs]:
        """Return the own head's best classes of each image: of most batches this is all that is
        asked for.
        """
        request = BatchRequest(max(each.top_k for each in requests))
        arrays = self._backend.predict(images, request).tensors()
        scores, indices, finite = arrays["scores"], arrays["indices"], arrays["finite"].tolist()
        thresholds = self.own.thresholds
        outputs: list[Outputs] = []
        for place, each in enumerate(requests):
            best = indices[place, : each.top_k]
            least = None if thresholds is None else thresholds[best]
            outputs.append(
                Outputs(scores[place, : each.top_k], best, finite=finite[place], least=least)
            )
        return outputs

    def _compute(
        self, images: Images, request: BatchRequest, aims: Mapping[int, tuple[int, Head, _Target]]
    ) -> tuple[dict[str, NDArray[Any]], dict[int, AttentionMap]]:
        """Return what a pass gives of a batch, and the maps of aims by their numbers, without score
        and evidence.
        """
        if not aims or not isinstance(self.config, ViTConfig):
            return self._backend.predict(images, request).tensors(), {}
        directed = [
            Aim(place, head.features, partial(_direction, target))
            for place, head, target in aims.values()
        ]
        arrays = self._backend.aim(images, request, directed).tensors()
        values, kept_mass = sharpened_maps(arrays.pop("aimed"), self.config)
        labels = (target(arrays[head.features][place])[0] for place, head, target in aims.values())
        requests = (MapRequest("relevance", label) for label in labels)
        return arrays, dict(
            zip(aims, map(AttentionMap, requests, values, kept_mass.tolist()), strict=True)
        )

    def _scorer(self, asked: RequestedOutputs) -> Head:
        """Return the head of a request's map, which a caller may have brought; raises as `_head`."""
        by = None if asked.map is None else asked.map.by
        if by is None:
            return self._head(asked.head)
        return Head(
            (),
            independent=False,
            weight=by.weight,
            bias=by.bias,
            normalized=by.normalized,
            features=by.features,
        )

    def _aim(self, asked: RequestedOutputs) -> tuple[Head, _Target] | None:
        """Return the head of a map of relevance, and what gives its class and direction by the
        features of an image.

        None where no such map is asked for, or the own head's.
        """
        if (
            asked.map is None
            or asked.map.method != "relevance"
            or (head := self._scorer(asked)) is self.own
        ):
            return None
        return head, partial(head.target, method="relevance", label=asked.map.class_index)

    def _head(self, name: str) -> Head:
        """Return the head of a name; ValueError where there is none: no other one answers in its
        place.
        """
        head = self.heads.get(name) if name else self.own
        if head is None:
            raise ValueError(f"the backbone has no head {name!r}")
        return head

    def _has_others(self, requests: Sequence[RequestedOutputs]) -> bool:
        """Return whether another head than the own one is to score an image of a batch, or several
        are.
        """
        return any(each.more or self._head(each.head) is not self.own for each in requests)

    def _batch_request(
        self, requests: Sequence[RequestedOutputs], has_others: bool
    ) -> BatchRequest:
        """Return what the backbone's pass computes for a batch: for further heads, what they read."""
        if has_others:
            flat = [each for asked in requests for each in asked.each]
            requests = [RequestedOutputs(1, embedding=EmbeddingRequest())]
            requests += [
                each if self._head(each.head) is self.own else _of_backbone(each) for each in flat
            ]
        return BatchRequest.of(requests, self.config)

    def _outputs(
        self,
        images: Images,
        request: BatchRequest,
        requests: Sequence[RequestedOutputs],
        arrays: Mapping[str, NDArray[Any]],
        head: Head,
        aimed: Mapping[int, AttentionMap],
    ) -> list[Outputs]:
        """Return what one head is asked for of each image, from what its batch gave.

        Args:
            request: of the whole batch.
            arrays: of these images.
            aimed: what `_compute` gives, by the places of these images.
        """
        scores, indices, finite = (arrays[name] for name in ("scores", "indices", "finite"))
        logits = arrays.get("logits")
        with_set = [place for place, each in enumerate(requests) if each.label_set]
        sets: dict[int, NDArray[np.int64]] = {}
        if head.label_sets is not None and logits is not None and with_set:
            sets = dict(zip(with_set, head.label_sets(logits[with_set]), strict=True))
        maps = {**self._maps_of_pass(arrays, request, requests, head), **aimed}
        maps |= self._maps_of_own_pass(images, requests, arrays, aimed)
        maps |= _with_evidence(maps, requests, logits, head)
        return [
            Outputs(
                scores=scores[place, : each.top_k],
                indices=indices[place, : each.top_k],
                map=maps.get(place),
                logits=logits[place] if logits is not None and each.logits else None,
                embedding=None
                if each.embedding is None
                else self._embedding(arrays, each.embedding, place),
                finite=bool(finite[place]),
                label_set=sets.get(place),
                least=None
                if head.thresholds is None
                else head.thresholds[indices[place, : each.top_k]],
            )
            for place, each in enumerate(requests)
        ]

    def _kinds(
        self,
        request: BatchRequest,
        requests: Sequence[RequestedOutputs],
        aimed_places: Collection[int],
    ) -> list[list[int]]:
        """Return the places of the images of each kind, which is launched by itself.

        Those with aims are torch's, a few at a time; where no graph computes all that a batch asks
        for, others are launched with a graph where they have one.
        """
        has_graph = self._backend.covers(request)
        kinds: dict[object, list[int]] = {}
        aimed = 0
        for place, each in enumerate(requests):
            is_aimed = place in aimed_places
            aimed += is_aimed
            of_network = None
            if not has_graph and not is_aimed:
                of_network = self._batch_request([each], self._has_others([each])).of_network
            kinds.setdefault(-(-aimed // SIZES[-1]) if is_aimed else (of_network,), []).append(
                place
            )
        return list(kinds.values())

    def _check_batch(self, images: Images, requests: int) -> None:
        count = len(images)
        expected = (*self.config.image_size, self.config.in_channels)
        are_right = all(image.shape == expected and image.dtype == np.uint8 for image in images)
        if not are_right or not 1 <= count <= self.max_batch:
            kinds = sorted({(str(image.dtype), image.shape) for image in images})
            raise ValueError(
                f"{count} images {kinds}: expected uint8 [1...{self.max_batch}, *{expected}]"
            )
        if requests != count:
            raise ValueError(f"{requests} requests for {count} images")

    def _embedding(
        self, arrays: Mapping[str, NDArray[Any]], request: EmbeddingRequest, place: int
    ) -> NDArray[np.float32]:
        """Return what is asked for of the embeddings of a batch: [D], in memory of its own."""
        embedding: Floats = arrays[request.pool][place].copy()
        if request.normalize:
            # What an embedding is divided by at least, as in torch's `normalize`.
            embedding /= max(float(np.linalg.norm(embedding)), 1e-12)
        return embedding

    def _maps_of_pass(
        self,
        arrays: Mapping[str, NDArray[Any]],
        request: BatchRequest,
        requests: Sequence[RequestedOutputs],
        head: Head,
    ) -> dict[int, AttentionMap]:
        """Return the maps that come out of the classification's pass, by the places of their
        images.
        """
        maps: dict[int, AttentionMap] = {}
        if not isinstance(self.config, ViTConfig):
            return maps
        if request.layers:
            maps = attention_maps(
                arrays["attention"], request.layers, [each.map for each in requests], self.config
            )
        places = [
            place
            for place, each in enumerate(requests)
            if each.map is not None and each.map.of_best_class
        ]
        if places and head is self.own:
            values, kept_mass = sharpened_maps(arrays["relevance"][places], self.config)
            of_classes = (
                MapRequest("relevance", label) for label in arrays["indices"][places, 0].tolist()
            )
            maps |= zip(
                places, map(AttentionMap, of_classes, values, kept_mass.tolist()), strict=True
            )
        return maps

    def _maps_of_own_pass(
        self,
        images: Images,
        requests: Sequence[RequestedOutputs],
        arrays: Mapping[str, NDArray[Any]],
        aimed: Collection[int],
    ) -> dict[int, AttentionMap]:
        """Return the maps that need passes of their own, each of its request's class or of the best
        one.

        Args:
            aimed: places of the images whose maps came out of the batch's pass.
        """
        passes: dict[tuple[MapRequest, Pooling | None], list[int]] = {}
        targets: dict[int, Floats] = {}
        classes = arrays["indices"][:, 0].copy()
        for place, each in enumerate(requests):
            if each.map is None or not each.map.needs_pass or place in aimed:
                continue
            if each.map.class_index is not None:
                classes[place] = each.map.class_index
            features_read: Pooling | None = None
            if each.map.is_class_specific and (scorer := self._scorer(each)) is not self.own:
                features_read = scorer.features
                features, label = arrays[scorer.features][place], each.map.class_index
                classes[place], targets[place] = scorer.target(features, each.map.method, label)
            passes.setdefault(
                (replace(each.map, class_index=None, by=None), features_read), []
            ).append(place)
        maps: dict[int, AttentionMap] = {}
        for (request, features_read), places in passes.items():
            pixels, labels = np.stack([images[place] for place in places]), classes[places]
            of_places: NDArray[Any] = labels
            if features_read is not None:
                of_places = np.stack([targets[place] for place in places])
            values, kept_mass = self._backend.explain(
                pixels, of_places, request, features_read or "head"
            )
            is_of_class = request.is_class_specific
            made = (
                replace(request, class_index=label if is_of_class else None)
                for label in labels.tolist()
            )
            maps |= zip(places, map(AttentionMap, made, values, kept_mass.tolist()), strict=True)
        return maps

    def embed_texts(self, texts: Sequence[str]) -> Floats:
        """Return the features of texts, float32 [N, D], computed by the calling thread alone.

        Raises:
            ValueError: the checkpoint has no text tower.
        """
        if self.checkpoint.embed_texts is None:
            raise ValueError(f"{self.checkpoint.name} has no text tower")
        from model.runtime.torch_pass import one_thread  # noqa: PLC0415  torch, of which the tower is

        with one_thread():
            return self.checkpoint.embed_texts(texts)

    def logits(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Return raw logits, before the temperature: float32 [B, num_classes]; for parity tests and
        calibration.
        """
        logits: Floats = self._backend.predict(images, BatchRequest(logits=True)).tensors()[
            "logits"
        ]
        return logits


def _direction(target: _Target, features: Floats) -> Floats:
    return target(features)[1]


def _of_backbone(asked: RequestedOutputs) -> RequestedOutputs:
    """Return what a pass gives of a request to another head than the own one."""
    own_map = None if asked.map is not None and asked.map.is_class_specific else asked.map
    return RequestedOutputs(1, own_map, embedding=asked.embedding)


def _with_evidence(
    maps: Mapping[int, AttentionMap],
    requests: Sequence[RequestedOutputs],
    logits: Floats | None,
    head: Head,
) -> dict[int, AttentionMap]:
    """Return the maps of a head's classes with their evidence; of a class of the caller's own the
    caller knows it.
    """
    classes: dict[int, int] = {}
    for place, found in maps.items():
        asked = requests[place].map
        if found.request.class_index is not None and asked is not None and asked.by is None:
            classes[place] = found.request.class_index
    if not classes:
        return {}
    assert logits is not None
    own = logits[[*classes]]
    abstains = head.abstains(own)
    scores, evidences = head.evidence(own, np.array([*classes.values()]), abstains)
    found_of = zip(classes, scores.tolist(), evidences.tolist(), abstains.tolist(), strict=True)
    return {
        place: replace(maps[place], score=score, evidence=evidence, abstained=abstained)
        for place, score, evidence, abstained in found_of
    }
