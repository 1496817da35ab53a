"""The heads of one backbone, and the outputs of its pass that they need."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from model.config import NetworkConfig
from model.heads import Head
from model.outputs import EmbeddingRequest, RequestedOutputs
from model.runtime.batch_request import BatchRequest


class HeadTable(NamedTuple):
    """The heads that score the images of one backbone.

    Attributes:
        own: the checkpoint's own head, whose logits the backbone's pass gives.
        by_name: all heads by the names in requests; an empty name means the own one.
    """

    own: Head
    by_name: Mapping[str, Head]

    def named(self, name: str) -> Head:
        """Return the head of a name.

        Raises:
            ValueError: the name is unknown; another head must not answer instead.
        """
        head = self.by_name.get(name) if name else self.own
        if head is None:
            raise ValueError(f"the backbone has no head {name!r}")
        return head

    def of_map(self, requested: RequestedOutputs) -> Head:
        """Return the head of a request's map, which the request may bring; raise as `named`."""
        linear = None if requested.map is None else requested.map.by
        if linear is None:
            return self.named(requested.head)
        return Head(
            (),
            independent=False,
            weight=linear.weight,
            bias=linear.bias,
            normalized=linear.normalized,
            features=linear.features,
        )

    def needs_aim(self, requested: RequestedOutputs) -> bool:
        """Return whether a request needs the relevance of a class of a further head."""
        if requested.map is None or requested.map.method != "relevance":
            return False
        return self.of_map(requested) is not self.own

    def batch_request(
        self, requests: Sequence[RequestedOutputs], config: NetworkConfig
    ) -> BatchRequest:
        """Combine the requests for a batch into one to the backbone, with features for other heads.

        Args:
            requests: one for each image, to one or more heads.
            config: the backbone's.
        """
        if all(not request.more and self.named(request.head) is self.own for request in requests):
            return BatchRequest.of(requests, config)
        to_backbone = [RequestedOutputs(1, embedding=EmbeddingRequest())]
        for request in requests:
            for requested in request.each:
                is_own = self.named(requested.head) is self.own
                to_backbone.append(requested if is_own else _without_head(requested))
        return BatchRequest.of(to_backbone, config)


def _without_head(requested: RequestedOutputs) -> RequestedOutputs:
    """Return the part of a request that does not depend on the head."""
    map_request = requested.map
    if map_request is not None and map_request.is_class_specific:
        map_request = None
    return RequestedOutputs(1, map_request, embedding=requested.embedding)
