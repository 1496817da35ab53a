"""Embeddings and labels in one batch, on every backend."""

from typing import Any

import numpy as np
import pytest
import torch

from model.checkpoint import Checkpoint
from model.config import ViTConfig
from model.errors import CheckpointError
from model.methods import methods
from model.network.vit import VisionTransformer
from model.outputs import (
    POOLINGS,
    EmbeddingRequest,
    MapRequest,
    Pooling,
    RequestedOutputs,
)
from model.runtime.openvino.network import unsupported_reason
from model.runtime.predictor import Predictor
from model.runtime.torch_pass import Normalise
from tests.model.runtime.cuda.device_stand_in import StandInOps
from tests.model.runtime.predictions import MODES
from tests.model.runtime.small_models import make_checkpoint, make_images

BACKENDS = (
    "torch",
    "stand-in",
    pytest.param(
        "openvino",
        marks=pytest.mark.skipif(
            unsupported_reason("float32") is not None, reason="openvino does not run here"
        ),
    ),
)
KINDS: dict[str, dict[str, Any]] = {
    "cls": {},
    "mean": {"pool": "mean", "class_token": False},
    "both": {"pool": "cls_mean", "registers": 2},
    "distilled": {"distillation_token": True, "distillation_head": True},
    "attention": {"pool": "attention", "class_token": False},
    "projected": {"projection_width": 10, "normalized_head": True},
}


def checkpoint_of(kind: str) -> Checkpoint:
    config = ViTConfig.model_validate(make_checkpoint(depth=1).config.model_dump() | KINDS[kind])
    torch.manual_seed(1)
    model = VisionTransformer(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return make_checkpoint(
        config=config,
        tensors={name: tensor.detach() for name, tensor in model.state_dict().items()},
    )


def predictor_of(backend: str, checkpoint: Checkpoint) -> Predictor:
    if backend == "stand-in":
        made = Predictor(
            checkpoint, device="cpu", dtype="float32", max_batch=8, streams=1, ops=StandInOps()
        )
        made.warm_up()  # batches use captured graphs
        return made
    return Predictor(
        checkpoint,
        device="cpu",
        dtype="float32",
        compile_mode=MODES[backend],
        threads=1,
        max_batch=8,
    )


def reference(checkpoint: Checkpoint, images: np.ndarray) -> dict[Pooling, np.ndarray]:
    """Return each embedding of each image from the plain network."""
    with torch.inference_mode():
        pixels = Normalise(checkpoint.preprocess)(torch.from_numpy(images))
        output = checkpoint.build()(pixels, (), 0, True, True)
    pools = [pool for pool in POOLINGS if pool != "cls" or checkpoint.vit.class_token]
    return {pool: output.embeddings[pool].numpy() for pool in pools}


def close(found: np.ndarray | None, expected: np.ndarray, backend: str) -> bool:
    assert found is not None
    assert found.dtype == np.float32
    assert found.shape == expected.shape
    # OpenVINO's kernels in float32, too
    return bool(
        np.abs(found - expected).max()
        <= (1e-4 if backend == "openvino" else 1e-5) * np.abs(expected).max()
    )


@pytest.mark.timeout(120)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_each_image_gets_its_own_embedding(kind: str, backend: str) -> None:
    checkpoint = checkpoint_of(kind)
    images = make_images(6)
    predictor = predictor_of(backend, checkpoint)
    expected = reference(checkpoint, make_images(6))
    few: list[Pooling | None] = ["head", None]
    for asked in ([*expected, None], few):  # with the patches of the last block, and without
        requests = [
            RequestedOutputs(
                2,
                MapRequest.attention_row(0) if place == 4 else None,
                logits=place == 5,
                embedding=None
                if (pool := asked[place % len(asked)]) is None
                else EmbeddingRequest(pool, place > 2),
            )
            for place in range(6)
        ]
        plain = predictor.predict(images, RequestedOutputs(2))
        for place, outputs in enumerate(predictor.predict(images, requests)):
            request = requests[place].embedding
            np.testing.assert_allclose(outputs.scores, plain[place].scores, atol=1e-5)
            assert (outputs.map is not None, outputs.logits is not None) == (place == 4, place == 5)
            if request is None:
                assert outputs.embedding is None
                continue
            row = expected[request.pool][place]
            assert close(
                outputs.embedding, row / np.linalg.norm(row) if request.normalize else row, backend
            )


@pytest.mark.timeout(120)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["distilled"])
def test_a_headless_model_embeds_the_same(kind: str, backend: str) -> None:
    headed = checkpoint_of(kind)
    images = make_images(3)
    config = headed.config.model_copy(update={"num_classes": 0})
    tensors = {
        name: tensor for name, tensor in headed.tensors.items() if not name.startswith("head")
    }
    headless = make_checkpoint(config=config, tensors=tensors, labels=())
    requested = RequestedOutputs(1, MapRequest.attention_row(0), embedding=EmbeddingRequest())
    requests = [requested]
    if "rollout" in methods():
        requests.append(RequestedOutputs(1, MapRequest("rollout")))
    one, other = (predictor_of(backend, checkpoint) for checkpoint in (headed, headless))
    for asked in requests:
        found: list[tuple[Any, Any]] = list(
            zip(other.predict(images, asked), one.predict(images, asked), strict=True)
        )
        for ours, expected in found:
            assert asked.embedding is None or close(ours.embedding, expected.embedding, backend)
            np.testing.assert_allclose(ours.map.values, expected.map.values, atol=1e-5)
    with pytest.raises(CheckpointError, match=r"unexpected key 'head\.bias'"):
        make_checkpoint(config=config, tensors=headed.tensors, labels=()).build()


def test_an_embedding_of_zeros_stays_zero() -> None:
    plain = make_checkpoint()
    zeros = {name: torch.zeros_like(tensor) for name, tensor in plain.tensors.items()}
    predictor = Predictor(
        make_checkpoint(tensors=zeros), device="cpu", dtype="float32", compile_mode="off"
    )
    [outputs] = predictor.predict(
        make_images(1), RequestedOutputs(1, embedding=EmbeddingRequest("head", True))
    )
    assert outputs.embedding is not None
    assert outputs.embedding.tolist() == [0.0] * 32


def test_an_embedding_holds_no_batch_memory() -> None:
    predictor = Predictor(make_checkpoint(), device="cpu", dtype="float32", compile_mode="off")
    outputs = predictor.predict(
        make_images(3), RequestedOutputs(1, embedding=EmbeddingRequest("mean"))
    )
    assert all(each.embedding is not None and each.embedding.base is None for each in outputs)
