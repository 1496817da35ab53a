"""Heads: a backbone gives the features of an image, and a head turns them into scores of labels.

A head is a value. A checkpoint has a head; the labels of a request make another head from the
features of their texts, if the checkpoint has a text tower (Radford et al. 2021, CLIP,
https://arxiv.org/abs/2103.00020; Zhai et al. 2023, SigLIP, https://arxiv.org/abs/2303.15343). All
heads are scored by `Head.outputs`. No torch is needed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Annotated, Any, Final

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from model.evidence import softmax_evidence
from model.features import Examples, Floats, normalized
from model.outputs import (
    RIVALS,
    AttentionMap,
    BestClasses,
    EmbeddingRequest,
    Linear,
    Outputs,
    Pooling,
    RequestedOutputs,
    best_classes,
)

# The template of transformers' pipeline `zero-shot-image-classification`.
DEFAULT_TEMPLATE: Final = "This is a photo of {}."

# Factor on the evidence when a head abstains, so small that the result is below `LITTLE_EVIDENCE`.
_ABSTAINED: Final = 0.1

_NOTHING: Final[Mapping[int, Any]] = MappingProxyType({})


class Form(BaseModel):
    """How scores decrease from the best class on; by default as in a softmax.

    If a class's logit is g temperatures below the best, its score is proportional to
    exp(-(g S^crowding)^power). S is the sum of exp(-g) over all classes: 1 if the best class is far
    from all others. The order of classes stays the same.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    power: Annotated[float, Field(ge=0.1, le=10)] = 1.0
    crowding: Annotated[float, Field(ge=-3, le=3)] = 0.0

    def negative_log_scores(self, scaled: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return -log of the unnormalised scores, [B, K].

        Args:
            scaled: logits divided by the temperature, [B, K].
        """
        below: NDArray[np.float64] = scaled.max(axis=-1, keepdims=True) - scaled
        if self == SOFTMAX:
            return below
        crowd = np.exp(-below).sum(axis=-1, keepdims=True)
        falls: NDArray[np.float64] = (below * crowd**self.crowding) ** self.power
        return falls


SOFTMAX: Final = Form()


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """A classifier of features.

    Attributes:
        labels: one for each class.
        independent: whether each class has its own sigmoid, instead of a share of one softmax.
        temperature: divisor of the logits.
        form: form of the scores, unless these are independent.
        weight, bias: float32 [C, D] and [C]; None if the backbone's own pass gives the logits.
        normalized: whether features are divided by their L2 norm first, so that logits are scaled
            cosines.
        features: the embedding of an image that the head reads, D values.
        label_sets: returns the sets of labels of logits [B, C], if the head is calibrated and sets
            are asked for; see `model.calibration.LabelSets`.
        known: the examples of a taught head, which abstains if an image is far from all of them.
        thresholds: float32 [C], the lowest score at which each class is predicted; None: 0.
    """

    labels: tuple[str, ...]
    independent: bool
    temperature: float = 1.0
    form: Form = SOFTMAX
    weight: Floats | None = None
    bias: Floats | float = 0.0
    normalized: bool = False
    features: Pooling = "head"
    label_sets: Callable[[Floats], list[NDArray[np.int64]]] | None = None
    known: Examples | None = None
    thresholds: Floats | None = None

    @property
    def multiplications(self) -> int:
        """Return the number of multiplications that scoring the features of one image takes."""
        cost = 0
        if self.weight is not None:
            cost += self.weight.size
        if self.known is not None:
            cost += self.known.examples.size
        return cost

    @property
    def linear(self) -> Linear:
        """Return the linear part, with which the backbone draws maps of this head's classes."""
        assert self.weight is not None, "the backbone's pass gives the logits"
        bias = np.asarray(self.bias, np.float32)
        return Linear(self.weight, bias, self.normalized, self.features)

    def backbone_request(self, requested: RequestedOutputs) -> RequestedOutputs:
        """Return the outputs that the backbone is asked for if this head scores its features.

        Args:
            requested: the caller's request to this head.
        """
        features = EmbeddingRequest(self.features)
        map_request = requested.map
        if map_request is not None and map_request.is_class_specific:
            map_request = replace(map_request, classifier=self.linear)
        embedding = requested.embedding
        if embedding is not None and embedding.pool == "head":
            embedding = replace(embedding, pool=self.features)  # "head" means this head's features
        more: tuple[RequestedOutputs, ...] = ()
        if embedding not in (None, features):
            more = (RequestedOutputs(1, embedding=embedding),)
        return RequestedOutputs(
            1, map_request, embedding=features, head_name=requested.head_name, more=more
        )

    def answer(self, requested: RequestedOutputs, of_backbone: Outputs) -> Outputs:
        """Return the outputs of one image from the backbone's outputs.

        Args:
            requested: the caller's request to this head.
            of_backbone: the answer to `backbone_request`.
        """
        assert of_backbone.embedding is not None
        features = of_backbone.embedding[np.newaxis]
        logits = self.logits(features)
        best = self.best_classes(logits, requested.top_k)
        best = best._replace(finite=best.finite & of_backbone.finite)
        maps = {} if of_backbone.map is None else {0: of_backbone.map}
        embeddings: dict[int, Floats] = {}
        if requested.embedding is not None:
            source = of_backbone.more[0] if of_backbone.more else of_backbone
            assert source.embedding is not None
            embeddings[0] = source.embedding
        [answer] = self.outputs(
            [requested], logits, best=best, features=features, maps=maps, embeddings=embeddings
        )
        return answer

    def outputs(
        self,
        requests: Sequence[RequestedOutputs],
        logits: Floats | None,
        *,
        best: BestClasses | None = None,
        features: Floats | None = None,
        maps: Mapping[int, AttentionMap] = _NOTHING,
        embeddings: Mapping[int, Floats] = _NOTHING,
    ) -> list[Outputs]:
        """Answer one request for each of B images.

        Args:
            requests: one request to this head per image.
            logits: [B, C]; None if `best` is given, no request needs all logits, and there are no
                thresholds.
            best: the best classes, if a graph has already ranked them on its device.
            features: [B, D], which tell whether an image is far from a taught head's examples.
            maps: attention maps by image, without score and evidence.
            embeddings: requested embeddings by image.
        """
        if best is None:
            assert logits is not None, "either a graph or this head ranks the classes"
            best = self.best_classes(logits, max(requested.top_k for requested in requests))
        if maps:
            maps = self._with_evidence(maps, requests, logits, features)
        label_sets = self._requested_sets(requests, logits)
        finite = best.finite.tolist()
        far = [False] * len(requests)
        if self.known is not None and features is not None:
            far = self.known.are_far(features).tolist()
        predicted_scores: list[float] | None = None
        if self.thresholds is not None:
            assert logits is not None, "thresholds are compared with all scores"
            predicted_scores = self._predicted_scores(logits).tolist()
        answers: list[Outputs] = []
        for image, requested in enumerate(requests):
            indices = best.indices[image, : requested.top_k]
            image_logits = None
            if requested.logits and logits is not None:
                image_logits = logits[image]
            thresholds = None if self.thresholds is None else self.thresholds[indices]
            answers.append(
                Outputs(
                    scores=best.scores[image, : requested.top_k],
                    indices=indices,
                    map=maps.get(image),
                    logits=image_logits,
                    embedding=embeddings.get(image),
                    finite=finite[image],
                    label_set=label_sets.get(image),
                    far=far[image],
                    thresholds=thresholds,
                    predicted_score=predicted_scores[image] if predicted_scores else None,
                )
            )
        return answers

    def logits(self, features: Floats) -> Floats:
        """Return the logits of features [B, D]: float32 [B, C]."""
        assert self.weight is not None, "the backbone's pass gives the logits"
        if self.normalized:
            features = normalized(features)
        logits: Floats = features @ self.weight.T + np.float32(self.bias)
        return logits

    def scores(self, logits: Floats) -> Floats:
        """Return the score of each class, float32 [B, C], 0...1, from logits [B, C].

        Scores of logits that are not finite are not finite either.
        """
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            exact = (logits / np.float32(self.temperature)).astype(np.float64)
            if self.independent:
                return (1 / (1 + np.exp(-exact))).astype(np.float32)
            powers = np.exp(-self.form.negative_log_scores(exact))
            shares: Floats = (powers / powers.sum(axis=-1, keepdims=True)).astype(np.float32)
            return shares

    def best_classes(self, logits: Floats, top_k: int) -> BestClasses:
        """Return the `top_k` best classes of logits [B, C]; see `best_classes`."""
        return best_classes(logits, self.scores(logits), top_k)

    def abstains(self, logits: Floats, features: Floats | None = None) -> NDArray[np.bool_]:
        """Return whether the head abstains from a label, bool [B].

        Args:
            logits: [B, C].
            features: [B, D], which a taught head compares with its examples.
        """
        abstains = np.zeros(len(logits), bool)
        if self.label_sets is not None:
            abstains |= [not len(label_set) for label_set in self.label_sets(logits)]
        if self.thresholds is not None:
            abstains |= self._predicted_scores(logits) < 0
        if self.known is not None and features is not None:
            abstains |= self.known.are_far(features)
        return abstains

    def _predicted_scores(self, logits: Floats) -> Floats:
        """Return the highest score of the classes that reach their thresholds, or -1: [B]."""
        assert self.thresholds is not None
        scores = self.scores(logits)
        highest: Floats = np.where(scores >= self.thresholds, scores, np.float32(-1)).max(axis=1)
        return highest

    def score_and_evidence(
        self, logits: Floats, classes: NDArray[np.int64], abstains: NDArray[np.bool_] | None = None
    ) -> tuple[Floats, Floats]:
        """Return the score of one class per image, and the evidence for it on a common scale.

        If scores are independent of each other, the evidence is the score; else see
        `model.evidence`. It is small for all classes of an image if the head abstains.

        Args:
            logits: [B, C].
            classes: int64 [B].
            abstains: bool [B], see `abstains`; None: the head does not abstain.

        Returns:
            Two float32 [B], 0...1.
        """
        all_scores = self.scores(logits)
        score: Floats = all_scores[np.arange(len(logits)), classes]
        evidence = score
        if not self.independent:
            evidence = softmax_evidence(logits, classes, all_scores)
        if abstains is not None:
            evidence = np.where(abstains, np.float32(_ABSTAINED) * evidence, evidence)
        return score, evidence

    def map_target(self, features: Floats, method: str, label: int | None) -> tuple[int, Floats]:
        """Return the class of a map, and the vector that the map starts from, float32 [D].

        With `relevance` that vector is the class's weight minus the mean weight of its rivals, so
        that it points where the margin grows. Relevance does not depend on the vector's scale.
        With every other method the vector is the class's weight.

        Args:
            features: [D].
            method: a class-specific method.
            label: the class; None for the best one.
        """
        assert self.weight is not None, "the backbone's pass starts from its own weight"
        [logits] = self.logits(features[np.newaxis])
        if label is None:
            label = int(self.best_classes(logits[np.newaxis], 1).indices[0, 0])
        direction: Floats = self.weight[label]
        if method != "relevance":
            return label, direction
        ranked = np.argsort(-logits, kind="stable")
        rivals = self.weight[ranked[ranked != label][:RIVALS]]
        if len(rivals):
            direction = direction - rivals.mean(axis=0)
        return label, direction / max(float(abs(self.weight).max()), 1e-12)

    def _requested_sets(
        self, requests: Sequence[RequestedOutputs], logits: Floats | None
    ) -> dict[int, NDArray[np.int64]]:
        """Return the requested sets of labels by image."""
        if self.label_sets is None or logits is None:
            return {}
        images = [image for image, requested in enumerate(requests) if requested.label_set]
        if not images:
            return {}
        return dict(zip(images, self.label_sets(logits[images]), strict=True))

    def _with_evidence(
        self,
        maps: Mapping[int, AttentionMap],
        requests: Sequence[RequestedOutputs],
        logits: Floats | None,
        features: Floats | None,
    ) -> Mapping[int, AttentionMap]:
        """Return the maps, with score and evidence if they show a class.

        Maps of a request's own classifier stay as they are; `Head.answer` scores them.
        """
        classes: dict[int, int] = {}
        for image, shown in maps.items():
            map_request = requests[image].map
            is_of_caller = map_request is None or map_request.classifier is not None
            if shown.request.class_index is not None and not is_of_caller:
                classes[image] = shown.request.class_index
        if not classes:
            return maps
        assert logits is not None, "evidence compares all logits"
        images = [*classes]
        shown_features = None if features is None else features[images]
        abstains = self.abstains(logits[images], shown_features)
        scores, evidences = self.score_and_evidence(
            logits[images], np.array([*classes.values()]), abstains
        )
        with_evidence = dict(maps)
        for row, image in enumerate(images):
            with_evidence[image] = replace(
                maps[image],
                score=float(scores[row]),
                evidence=float(evidences[row]),
                abstained=bool(abstains[row]),
            )
        return with_evidence


@dataclass(frozen=True, slots=True)
class ZeroShot:
    """How a checkpoint with a text tower compares images with labels.

    Attributes:
        scale, bias: scale and bias of the logits.
        independent: whether scores are sigmoids, instead of one softmax.
        templates: texts in which `{}` stands for the label; the features of several are averaged.
    """

    scale: float
    bias: float
    independent: bool
    templates: tuple[str, ...]

    def prompts(self, labels: Sequence[str]) -> list[str]:
        """Return the texts of all labels, label by label."""
        return [template.replace("{}", label) for label in labels for template in self.templates]

    def head(self, labels: Sequence[str], texts: Floats) -> Head:
        """Return the head of labels.

        Args:
            labels: its classes.
            texts: the features of the labels' `prompts`, [labels templates, D].
        """
        by_label = normalized(texts).reshape(-1, len(self.templates), texts.shape[1])
        weight = np.float32(self.scale) * normalized(by_label.mean(axis=1))
        return Head(tuple(labels), self.independent, weight=weight, bias=self.bias, normalized=True)
