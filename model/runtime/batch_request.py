"""The union of the outputs that a batch needs of one pass of its backbone.

No torch is needed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Self

from model.config import NetworkConfig, ViTConfig
from model.heads import Head
from model.outputs import Pooling, RequestedOutputs

# The graphs that OpenVINO computes, each a network of its own, so that an image costs only what its
# batch asks for.
GraphKind = Literal["plain", "relevance", "transfer"]


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """The union of the outputs that the images of a batch need from one pass.

    Attributes:
        top_k: number of classes.
        logits: whether to return the logits of all classes.
        layers: layers whose attention rows to return, ascending.
        relevance: whether to return the relevance of each image's best class.
        embeddings: embeddings to return, sorted.
        all_tokens: whether an embedding needs tokens of the last block that the head does not read.
        transfer: whether to return the embedding `transfer`, which needs outputs of several blocks.
    """

    top_k: int = 1
    logits: bool = False
    layers: tuple[int, ...] = ()
    relevance: bool = False
    embeddings: tuple[Pooling, ...] = ()
    all_tokens: bool = False
    transfer: bool = False

    @classmethod
    def of_graph(cls, kind: GraphKind, config: NetworkConfig) -> Self:
        """Return the outputs that a graph of OpenVINO computes for a model."""
        # A mean over the patch queries takes all scores of a block, so torch computes it on demand.
        layers: tuple[int, ...] = ()
        if isinstance(config, ViTConfig) and config.attention_source != "patch_mean":
            layers = (config.depth - 1,)
        is_transfer = kind == "transfer"
        return cls(
            layers=layers,
            relevance=kind == "relevance",
            all_tokens=is_transfer and _head_reads_cls(config),
            transfer=is_transfer,
        )

    @property
    def graph_kind(self) -> GraphKind:
        """Return the graph that may compute this; see `covers`."""
        if self.relevance:
            return "relevance"
        return "transfer" if self.transfer or self.all_tokens else "plain"

    @property
    def graph_part(self) -> Self:
        """Return the part that a CUDA graph is made for.

        Every pass computes logits and embeddings, and copies them to the host on request.
        """
        return replace(self, logits=False, embeddings=())

    @property
    def network_part(self) -> Self:
        """Return the part that changes the network's pass, without the ranking of its logits."""
        return replace(self.graph_part, top_k=1)

    def covers(self, other: Self) -> bool:
        """Return whether a network that computes this gives all outputs of another request."""
        return (
            other.layers in ((), self.layers)
            and other.relevance <= self.relevance
            and other.all_tokens <= self.all_tokens
            and other.transfer <= self.transfer
        )


def _head_reads_cls(config: NetworkConfig) -> bool:
    """Return whether the head reads only the CLS token of the last block."""
    return isinstance(config, ViTConfig) and config.pool == "cls"


class HeadTable(NamedTuple):
    """The heads that score the images of one backbone.

    Attributes:
        own: the checkpoint's own head, whose logits the backbone's pass gives.
        by_name: all heads by the names in requests; an empty name means `own`.
    """

    own: Head
    by_name: Mapping[str, Head]

    def head(self, name: str) -> Head:
        """Return the head of a name.

        Raises:
            ValueError: the name is unknown; another head must not answer instead.
        """
        head = self.by_name.get(name) if name else self.own
        if head is None:
            raise ValueError(f"the backbone has no head {name!r}")
        return head

    def map_head(self, requested: RequestedOutputs) -> Head:
        """Return the head of a request's map, which the request may bring; raise as `head`."""
        linear = None if requested.map is None else requested.map.classifier
        if linear is None:
            return self.head(requested.head_name)
        return Head(
            (),
            independent=False,
            weight=linear.weight,
            bias=linear.bias,
            normalized=linear.normalized,
            features=linear.features,
        )

    def needs_aim(self, requested: RequestedOutputs) -> bool:
        """Return whether a request needs the relevance of a class of another head."""
        wanted = requested.map
        if wanted is None or wanted.method != "relevance":
            return False
        return wanted.classifier is not None or self.head(requested.head_name) is not self.own

    def batch_request(
        self, requests: Sequence[RequestedOutputs], config: NetworkConfig
    ) -> BatchRequest:
        """Return the union of the requests for a batch, with the features that other heads read.

        Args:
            requests: one for each image, to one or more heads.
            config: the backbone's.
        """
        top_k = 1
        logits = self.own.thresholds is not None
        relevance = False
        layers: set[int] = set()
        pools: set[Pooling] = set()
        for requested in (part for request in requests for part in request.head_requests):
            wanted = requested.map
            if requested.embedding is not None:
                pools.add(requested.embedding.pool)
            if wanted is not None and wanted.layer is not None:
                layers.add(wanted.layer)
            if wanted is not None and wanted.classifier is not None:
                pools.add(wanted.classifier.features)
            head = self.head(requested.head_name)
            if head is not self.own:
                pools.add(head.features)
                continue
            top_k = max(top_k, requested.top_k)
            logits = logits or requested.logits or requested.label_set
            if wanted is not None and wanted.classifier is None:
                # Evidence for a class compares all logits.
                logits = logits or wanted.is_class_specific
                relevance = relevance or wanted.of_best_class
        return BatchRequest(
            top_k=top_k,
            logits=logits,
            layers=tuple(sorted(layers)),
            relevance=relevance,
            embeddings=tuple(sorted(pools)),
            all_tokens=bool(pools & {"mean", "transfer"}) and _head_reads_cls(config),
            transfer="transfer" in pools,
        )
