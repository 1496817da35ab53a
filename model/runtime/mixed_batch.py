"""A batch whose images ask for maps, embeddings, logits or other heads.

Names of indices:

    image       of an image in the batch
    number      of a request to one head, over all images: an image has several if its request has
                `more`
    row         of a request among those to the same head; also of its row in their arrays
    position    of an entry in any shorter selection, such as the rows that share a pass
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.config import NetworkConfig, ViTConfig
from model.explanation.maps import attention_maps, sharpened_maps
from model.features import Floats
from model.heads import Head
from model.outputs import (
    AttentionMap,
    BestClasses,
    EmbeddingRequest,
    MapRequest,
    Outputs,
    Pooling,
    RequestedOutputs,
)
from model.runtime.backend import SIZES, Aim, Backend, Images, best_classes_of_graph
from model.runtime.batch_request import BatchRequest, HeadTable

Arrays = Mapping[str, NDArray[Any]]


class _HeadRequest(NamedTuple):
    """A request to one head for one image.

    Attributes:
        image: index of the image in the batch.
        requested: the outputs that the head computes.
        map_head: the head whose class a map shows.
    """

    image: int
    requested: RequestedOutputs
    map_head: Head


class _Pass(NamedTuple):
    """The result of a batch's pass.

    Attributes:
        request: the outputs requested of the pass.
        arrays: its outputs by name.
        aimed: maps of other heads' classes, by the number of their request.
    """

    request: BatchRequest
    arrays: Arrays
    aimed: dict[int, AttentionMap]


class MixedBatch:
    """Computes the outputs of one batch, for any requests.

    Args:
        images: B images, see `Predictor.predict`.
        requests: one for each image.
        heads: the heads of the backbone.
        backend: runs the backbone.
        config: the backbone's.

    Raises:
        ValueError: a request names an unknown head.
    """

    def __init__(
        self,
        images: Images,
        requests: Sequence[RequestedOutputs],
        heads: HeadTable,
        backend: Backend,
        config: NetworkConfig,
    ) -> None:
        self._images = images
        self._requests = requests
        self._heads = heads
        self._backend = backend
        self._config = config
        self._head_requests = [
            _HeadRequest(image, requested, heads.map_head(requested))
            for image, request in enumerate(requests)
            for requested in request.head_requests
        ]

    def outputs(self) -> list[Outputs]:
        """Compute the batch, in one launch or several, and answer each request."""
        request = self._heads.batch_request(self._requests, self._config)
        launches = self._launches(request)
        if len(launches) > 1:
            return self._outputs_of_launches(launches)
        computed = self._pass(request)
        numbers_by_head: dict[str, list[int]] = {}
        for number, head_request in enumerate(self._head_requests):
            numbers_by_head.setdefault(head_request.requested.head, []).append(number)
        answers: dict[int, Outputs] = {}
        for name, numbers in numbers_by_head.items():
            of_head = self._outputs_of_head(self._heads.head(name), numbers, computed)
            answers.update(zip(numbers, of_head, strict=True))
        in_order = iter(answers[number] for number in range(len(self._head_requests)))
        outputs: list[Outputs] = []
        for requested in self._requests:
            output = next(in_order)
            if requested.more:
                output = replace(output, more=tuple(islice(in_order, len(requested.more))))
            outputs.append(output)
        return outputs

    def _launches(self, request: BatchRequest) -> list[list[int]]:
        """Return the images of each launch.

        Torch computes images with aims, a few at a time. If no graph computes the whole batch,
        images are grouped so that those with a graph are launched with it.
        """
        is_covered = self._backend.covers(request)
        launches: dict[object, list[int]] = {}
        aimed = 0
        for image, requested in enumerate(self._requests):
            key: object = None
            if any(map(self._heads.needs_aim, requested.head_requests)):
                key = aimed // SIZES[-1]
                aimed += 1
            elif not is_covered:
                key = self._heads.batch_request([requested], self._config).network_part
            launches.setdefault(key, []).append(image)
        return list(launches.values())

    def _outputs_of_launches(self, launches: Sequence[Sequence[int]]) -> list[Outputs]:
        outputs: dict[int, Outputs] = {}
        for launched in launches:
            part = MixedBatch(
                [self._images[image] for image in launched],
                [self._requests[image] for image in launched],
                self._heads,
                self._backend,
                self._config,
            )
            outputs.update(zip(launched, part.outputs(), strict=True))
        return [outputs[image] for image in range(len(self._images))]

    def _pass(self, request: BatchRequest) -> _Pass:
        """Run the backbone once, with the maps of other heads' classes."""
        numbers = [
            number
            for number, head_request in enumerate(self._head_requests)
            if self._heads.needs_aim(head_request.requested)
        ]
        if not numbers or not isinstance(self._config, ViTConfig):
            return _Pass(request, self._backend.predict(self._images, request).tensors(), {})
        aims: list[Aim] = []
        for number in numbers:
            image, requested, head = self._head_requests[number]
            aims.append(Aim(image, head.features, partial(_direction, head, requested)))
        arrays = self._backend.aim(self._images, request, aims).tensors()
        values, kept_mass = sharpened_maps(arrays.pop("aimed"), self._config)
        aimed: dict[int, AttentionMap] = {}
        for position, number in enumerate(numbers):
            image, requested, head = self._head_requests[number]
            label, _ = _target(head, requested, arrays[head.features][image])
            aimed[number] = AttentionMap(
                MapRequest("relevance", label), values[position], float(kept_mass[position])
            )
        return _Pass(request, arrays, aimed)

    def _outputs_of_head(
        self, head: Head, numbers: Sequence[int], computed: _Pass
    ) -> list[Outputs]:
        """Answer the requests to one head.

        Args:
            head: the head that scores the images.
            numbers: numbers of the requests to it.
            computed: the batch's pass.
        """
        head_requests = [self._head_requests[number] for number in numbers]
        requests = [head_request.requested for head_request in head_requests]
        images = [head_request.image for head_request in head_requests]
        arrays = computed.arrays
        if images != list(range(len(self._images))):
            arrays = {name: values[images] for name, values in arrays.items()}
        if head is self._heads.own:
            logits = arrays.get("logits")
            best = best_classes_of_graph(arrays)
        else:
            logits = head.logits(arrays[head.features])
            best = None
        if best is None:
            assert logits is not None, "a pass gives logits unless its graph ranks the classes"
            best = head.best_classes(logits, max(requested.top_k for requested in requests))
        maps = self._maps_of_pass(head, requests, computed._replace(arrays=arrays), best)
        for row, number in enumerate(numbers):
            if number in computed.aimed:
                maps[row] = computed.aimed[number]
        maps |= self._maps_of_own_passes(head_requests, arrays, best, maps)
        embeddings = {
            row: _embedding(arrays, requested.embedding, row)
            for row, requested in enumerate(requests)
            if requested.embedding is not None
        }
        return head.outputs(requests, logits, best=best, maps=maps, embeddings=embeddings)

    def _maps_of_pass(
        self, head: Head, requests: Sequence[RequestedOutputs], computed: _Pass, best: BestClasses
    ) -> dict[int, AttentionMap]:
        """Return the maps that come out of the batch's pass, by the row of their image.

        Args:
            head: the head of the requests.
            requests: one for each row.
            computed: the pass, with arrays of these rows.
            best: the best classes of these rows.
        """
        maps: dict[int, AttentionMap] = {}
        if not isinstance(self._config, ViTConfig):
            return maps
        if computed.request.layers:
            maps = attention_maps(
                computed.arrays["attention"],
                computed.request.layers,
                [requested.map for requested in requests],
                self._config,
            )
        if head is not self._heads.own:
            return maps
        rows = [
            row
            for row, requested in enumerate(requests)
            if requested.map is not None and requested.map.of_best_class
        ]
        if not rows:
            return maps
        values, kept_mass = sharpened_maps(computed.arrays["relevance"][rows], self._config)
        labels = best.indices[rows, 0].tolist()
        for position, row in enumerate(rows):
            maps[row] = AttentionMap(
                MapRequest("relevance", labels[position]),
                values[position],
                float(kept_mass[position]),
            )
        return maps

    def _maps_of_own_passes(
        self,
        head_requests: Sequence[_HeadRequest],
        arrays: Arrays,
        best: BestClasses,
        finished: Mapping[int, AttentionMap],
    ) -> dict[int, AttentionMap]:
        """Return the maps that need their own passes, by row.

        Requests that differ only in their class share a pass.

        Args:
            head_requests: one for each row.
            arrays: outputs of the batch's pass for these rows.
            best: the best classes of these rows, which a map shows if its request names no class.
            finished: maps that came out of the batch's pass.
        """
        rows_by_pass: dict[tuple[MapRequest, Pooling | None], list[int]] = {}
        labels = best.indices[:, 0].copy()
        directions: dict[int, Floats] = {}
        for row, (_, requested, head) in enumerate(head_requests):
            wanted = requested.map
            if wanted is None or not wanted.needs_pass or row in finished:
                continue
            if wanted.class_index is not None:
                labels[row] = wanted.class_index
            features: Pooling | None = None
            if wanted.is_class_specific and head is not self._heads.own:
                features = head.features
                labels[row], directions[row] = _target(head, requested, arrays[features][row])
            shared = replace(wanted, class_index=None, classifier=None)
            rows_by_pass.setdefault((shared, features), []).append(row)
        maps: dict[int, AttentionMap] = {}
        for (shared, features), rows in rows_by_pass.items():
            images = np.stack([self._images[head_requests[row].image] for row in rows])
            targets: NDArray[Any] = labels[rows]
            if features is not None:
                targets = np.stack([directions[row] for row in rows])
            values, kept_mass = self._backend.explain(images, targets, shared, features or "head")
            for position, row in enumerate(rows):
                shown = shared
                if shared.is_class_specific:
                    shown = replace(shared, class_index=int(labels[row]))
                maps[row] = AttentionMap(shown, values[position], float(kept_mass[position]))
        return maps


def _target(head: Head, requested: RequestedOutputs, features: Floats) -> tuple[int, Floats]:
    """Return the class of a map and the vector that it starts from, for features [D]."""
    assert requested.map is not None
    return head.map_target(features, requested.map.method, requested.map.class_index)


def _direction(head: Head, requested: RequestedOutputs, features: Floats) -> Floats:
    _, direction = _target(head, requested, features)
    return direction


def _embedding(arrays: Arrays, request: EmbeddingRequest, row: int) -> Floats:
    """Return the requested embedding of an image, [D], in its own memory."""
    embedding: Floats = arrays[request.pool][row].copy()
    if request.normalize:
        # torch's `normalize` has the same smallest divisor.
        embedding /= max(float(np.linalg.norm(embedding)), 1e-12)
    return embedding
