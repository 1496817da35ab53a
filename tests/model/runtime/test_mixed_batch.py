"""The example of `model.runtime.mixed_batch`, on a backend that notes its calls."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.config import ViTConfig
from model.heads import Head
from model.outputs import MapRequest, Pooling, RequestedOutputs
from model.runtime.backend import Aim, Backend, HostOutputs, Images
from model.runtime.batch_request import BatchRequest, HeadTable
from model.runtime.mixed_batch import MixedBatch

CONFIG = ViTConfig(
    image_size=(16, 16), patch_size=8, num_classes=9, width=8, depth=2, heads=2, mlp_width=8
)
OWN = Head(tuple("abcdefghi"), independent=False)
PETS = Head(tuple("xyz"), independent=False, weight=np.eye(3, 8, dtype=np.float32))


class Noting(Backend):
    """Gives image n the logits of class n, and notes the images of each call."""

    name = "noting"
    usual = ()

    def __init__(self) -> None:
        self.passes: list[tuple[list[int], BatchRequest]] = []
        self.aims: list[tuple[list[int], list[Aim]]] = []
        self.explained: list[tuple[list[int], list[int], MapRequest]] = []

    def predict(self, images: Images, request: BatchRequest) -> HostOutputs:
        numbers = [int(image[0, 0, 0]) for image in images]
        self.passes.append((numbers, request))
        tokens = np.ones((len(numbers), CONFIG.tokens), np.float32)
        return {
            "logits": 9 * np.eye(9, dtype=np.float32)[numbers],
            "head": 9 * np.eye(8, dtype=np.float32)[numbers],
            "relevance": tokens,
        }

    def compile(self) -> None:
        raise NotImplementedError

    def load_torch(self) -> "Noting":
        return self

    def aim(self, images: Images, request: BatchRequest, aims: Sequence[Aim]) -> HostOutputs:
        outputs = self.predict(images, request)
        numbers, _ = self.passes.pop()
        self.aims.append((numbers, list(aims)))
        return outputs | {"aimed": np.ones((len(aims), CONFIG.tokens), np.float32)}

    def explain(
        self,
        images: NDArray[np.uint8],
        targets: NDArray[Any],
        request: MapRequest,
        features: Pooling = "head",
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        self.explained.append((images[:, 0, 0, 0].tolist(), targets.tolist(), request))
        count = len(images)
        return np.full((count, 2, 2), 0.25, np.float32), np.ones(count, np.float32)


def answered(*requests: RequestedOutputs) -> tuple[Noting, list[Any]]:
    """Return the backend and the outputs of images 0, 1, 2, ..."""
    backend = Noting()
    images = [np.full((16, 16, 3), number, np.uint8) for number in range(len(requests))]
    heads = HeadTable(OWN, {"pets": PETS})
    return backend, MixedBatch(images, requests, heads, backend, CONFIG).outputs()


RELEVANCE = MapRequest("relevance")
EXAMPLE = (
    RequestedOutputs(5),
    RequestedOutputs(1, RELEVANCE, more=(RequestedOutputs(1, RELEVANCE, head_name="pets"),)),
    RequestedOutputs(3, head_name="pets"),
    RequestedOutputs(1, MapRequest("relevance", 7)),
)


def test_images_of_the_example_share_a_pass() -> None:
    backend, _ = answered(*EXAMPLE)
    [(images, request)] = backend.passes
    assert images == [0, 2, 3]
    assert request == BatchRequest(top_k=5, logits=True, embeddings=("head",))


def test_a_map_of_another_head_is_aimed() -> None:
    backend, outputs = answered(*EXAMPLE)
    assert backend.aims == [([1], [Aim(0, PETS, None)])]
    assert outputs[1].map.request == MapRequest("relevance", 1)
    [of_pets] = outputs[1].more
    assert of_pets.map.request == MapRequest("relevance", 1)
    assert of_pets.indices.tolist() == [1]


def test_maps_of_named_classes_share_a_pass() -> None:
    named = [RequestedOutputs(1, MapRequest("relevance", index)) for index in (7, 4)]
    backend, outputs = answered(RequestedOutputs(1), *named)
    assert backend.explained == [([1, 2], [7, 4], RELEVANCE)]
    assert [output.map.request.class_index for output in outputs[1:]] == [7, 4]


def test_each_head_scores_only_its_images() -> None:
    _, outputs = answered(*EXAMPLE)
    assert [output.indices.tolist() for output in outputs] == [
        [0, 1, 2, 3, 4],
        [1],
        [2, 0, 1],
        [3],
    ]
