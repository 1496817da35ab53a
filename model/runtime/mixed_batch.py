"""A batch whose images want different outputs: one pass for all, and a pick for each.

For example, four images arrive at a backbone with its own head and another head, `pets`:

    image  wants                                    questions
    0      5 classes of the own head                (0, own)
    1      1 class of each head, and a map of it    (1, own, relevance), (1, pets, relevance)
    2      3 classes of `pets`                      (2, pets)
    3      1 class of the own head, a map of no. 7  (3, own, relevance of no. 7)

1. Images are grouped into launches. Image 1 is alone, because a map of another head's class takes
   torch's pass. For the others, one graph computes everything that the pass has to give.
2. A launch runs one pass for the union of its images' wants: `BatchRequest`. For 0, 2 and 3, that
   is logits, 5 best classes and the features that `pets` reads.
3. Each head answers all of its questions at once: the own head with rows 0 and 3 of the pass, and
   `pets` with row 2.
4. A map of another class than the best takes a pass of its own, for image 3. Questions that differ
   only in their class share it.
5. The answers of one image are joined again: those to further questions are its `more`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from model.config import NetworkConfig, ViTConfig
from model.explanation.maps import attention_maps, relevance_maps
from model.features import Floats, normalized
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
from model.runtime.backend import Aim, Backend, HostOutputs, Images, best_classes_of_graph
from model.runtime.batch_request import BatchRequest, HeadTable
from model.runtime.batch_sizes import SIZES


@dataclass(slots=True, eq=False)
class _Question:
    """A request to one head for one image, and the parts of its answer so far.

    Attributes:
        image: index of the image in its launch.
        requested: the outputs that the head computes.
        map_head: the head whose class a map shows.
    """

    image: int
    requested: RequestedOutputs
    map_head: Head
    map: AttentionMap | None = None
    outputs: Outputs | None = None


@dataclass(frozen=True, slots=True)
class MixedBatch:
    """A batch of any requests.

    Attributes:
        images: B images, see `Predictor.predict`.
        requests: one for each image.
        heads: the heads of the backbone.
        backend: runs the backbone.
        config: the backbone's.
    """

    images: Images
    requests: Sequence[RequestedOutputs]
    heads: HeadTable
    backend: Backend
    config: NetworkConfig

    def outputs(self) -> list[Outputs]:
        """Answer each request, in as few launches as possible.

        Raises:
            ValueError: a request names an unknown head.
        """
        request = self.heads.batch_request(self.requests, self.config)
        launches = self._launches(request)
        if len(launches) == 1:
            return self._launch(request)
        outputs: dict[int, Outputs] = {}
        for launched in launches:
            batch = replace(
                self,
                images=[self.images[image] for image in launched],
                requests=[self.requests[image] for image in launched],
            )
            outputs.update(zip(launched, batch.outputs(), strict=True))
        return [outputs[image] for image in range(len(self.images))]

    def _launches(self, request: BatchRequest) -> list[list[int]]:
        """Return the images of each launch.

        Torch computes images with aims, a few at a time. The others are one launch if one graph
        computes them all, else one launch for each graph that they need.
        """
        is_covered = self.backend.covers(request)
        launches: dict[object, list[int]] = {}
        aimed = 0
        for image, requested in enumerate(self.requests):
            key: object = None
            if any(map(self.heads.needs_aim, requested.head_requests)):
                key = aimed // SIZES[-1]
                aimed += 1
            elif not is_covered:
                key = self.heads.batch_request([requested], self.config).network_part
            launches.setdefault(key, []).append(image)
        return list(launches.values())

    def _launch(self, request: BatchRequest) -> list[Outputs]:
        """Run the pass of all images, and answer the questions about them."""
        questions = [
            _Question(image, part, self.heads.map_head(part))
            for image, requested in enumerate(self.requests)
            for part in requested.head_requests
        ]
        arrays = self._pass(request, questions)
        questions_by_head: dict[str, list[_Question]] = {}
        for question in questions:
            questions_by_head.setdefault(question.requested.head_name, []).append(question)
        for name, members in questions_by_head.items():
            self._answer(self.heads.head(name), members, request, arrays)
        answers_by_image: list[list[Outputs]] = [[] for _ in self.images]
        for question in questions:
            assert question.outputs is not None
            answers_by_image[question.image].append(question.outputs)
        return [
            first._replace(more=tuple(more)) if more else first for first, *more in answers_by_image
        ]

    def _pass(self, request: BatchRequest, questions: Sequence[_Question]) -> HostOutputs:
        """Run the backbone once, and add maps of other heads' classes to their questions."""
        aimed = [question for question in questions if self.heads.needs_aim(question.requested)]
        if not aimed or not isinstance(self.config, ViTConfig):
            return self.backend.predict(self.images, request)
        aims: list[Aim] = []
        for question in aimed:
            assert question.requested.map is not None
            aims.append(Aim(question.image, question.map_head, question.requested.map.class_index))
        arrays = self.backend.load_torch().aim(self.images, request, aims)
        labels = [aim.target(arrays[aim.head.features])[0] for aim in aims]
        maps = relevance_maps(arrays.pop("aimed"), labels, self.config)
        for question, attention_map in zip(aimed, maps, strict=True):
            question.map = attention_map
        return arrays

    def _answer(
        self,
        head: Head,
        questions: Sequence[_Question],
        request: BatchRequest,
        arrays: HostOutputs,
    ) -> None:
        """Answer the questions to one head.

        Args:
            head: the head that scores the images.
            questions: all questions to it.
            request: the outputs that the pass computes.
            arrays: outputs of the pass for all images.
        """
        images = [question.image for question in questions]
        requests = [question.requested for question in questions]
        logits = None
        best = None
        if head is not self.heads.own:
            logits = head.logits(arrays[head.features][images])
        else:
            if "logits" in arrays:
                logits = arrays["logits"][images]
            of_graph = best_classes_of_graph(arrays)
            if of_graph is not None:
                best = BestClasses._make(values[images] for values in of_graph)
        if best is None:
            assert logits is not None, "a pass gives logits unless its graph ranks the classes"
            best = head.best_classes(logits, max(requested.top_k for requested in requests))
        self._add_maps_of_pass(head, questions, request, arrays, best)
        self._add_maps_of_own_passes(questions, arrays, best)
        answers = head.outputs(
            requests,
            logits,
            best=best,
            maps={
                row: question.map
                for row, question in enumerate(questions)
                if question.map is not None
            },
            embeddings={
                row: _embedding(arrays, question.requested.embedding, question.image)
                for row, question in enumerate(questions)
                if question.requested.embedding is not None
            },
        )
        for question, outputs in zip(questions, answers, strict=True):
            question.outputs = outputs

    def _add_maps_of_pass(
        self,
        head: Head,
        questions: Sequence[_Question],
        request: BatchRequest,
        arrays: HostOutputs,
        best: BestClasses,
    ) -> None:
        """Add the maps that come out of the batch's pass.

        Args:
            head: the head of the questions.
            questions: one for each row.
            request: the outputs that the pass computes.
            arrays: outputs of the pass for all images.
            best: the best classes of these rows.
        """
        if not isinstance(self.config, ViTConfig):
            return
        maps: dict[int, AttentionMap] = {}
        wanted = [question.requested.map for question in questions]
        if request.layers:
            attention = arrays["attention"][[question.image for question in questions]]
            maps = attention_maps(attention, request.layers, wanted, self.config)
        rows = [row for row, shown in enumerate(wanted) if shown and shown.of_best_class]
        if rows and head is self.heads.own:
            labels = best.indices[rows, 0].tolist()
            relevance = arrays["relevance"][[questions[row].image for row in rows]]
            of_best_class = relevance_maps(relevance, labels, self.config)
            maps.update(zip(rows, of_best_class, strict=True))
        for row, attention_map in maps.items():
            questions[row].map = attention_map

    def _add_maps_of_own_passes(
        self, questions: Sequence[_Question], arrays: HostOutputs, best: BestClasses
    ) -> None:
        """Add the maps that need their own passes.

        Args:
            questions: one for each row.
            arrays: outputs of the batch's pass for all images.
            best: the best classes of these rows, which a map shows if its request names no class.
        """
        # The questions of each pass, with the class of each map and its start.
        passes: dict[
            tuple[MapRequest, Pooling | None], list[tuple[_Question, int, int | Floats]]
        ] = {}
        for row, question in enumerate(questions):
            wanted = question.requested.map
            if wanted is None or not wanted.needs_pass or question.map is not None:
                continue
            label = wanted.class_index
            if label is None:
                label = int(best.indices[row, 0])
            target: int | Floats = label
            features: Pooling | None = None
            head = question.map_head
            if wanted.is_class_specific and head is not self.heads.own:
                features = head.features
                label, target = head.map_target(
                    arrays[features][question.image], wanted.method, wanted.class_index
                )
            shared = replace(wanted, class_index=None, classifier=None)
            passes.setdefault((shared, features), []).append((question, label, target))
        for (shared, features), members in passes.items():
            values, kept_mass = self.backend.load_torch().explain(
                np.stack([self.images[question.image] for question, _, _ in members]),
                np.stack([target for _, _, target in members]),
                shared,
                features or "head",
            )
            for row, (question, label, _) in enumerate(members):
                shown = shared
                if shared.is_class_specific:
                    shown = replace(shared, class_index=label)
                question.map = AttentionMap(shown, values[row], float(kept_mass[row]))


def _embedding(arrays: HostOutputs, request: EmbeddingRequest, image: int) -> Floats:
    """Return the requested embedding of an image, [D], in its own memory."""
    embedding: Floats = arrays[request.pool][image].copy()
    return normalized(embedding) if request.normalize else embedding
