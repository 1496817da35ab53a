"""Transfer features against a plain pass over the blocks."""

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from model.network.vit import VisionTransformer
from model.outputs import embedding_width
from tests.model.explanation.random_models import FAMILIES, model_of, pictures


def plain_features(model: VisionTransformer, pixels: Tensor) -> Tensor:
    x = model.embed(pixels)
    outputs = []
    config = model.config
    for block in model.blocks:
        x = block(x)[0]
        outputs.append(model.norm(x))
    means = [model.fc_norm(output[:, config.prefix_tokens :].mean(1)) for output in outputs[-3:]]
    if not config.class_token:
        return torch.cat(means, dim=1)
    return torch.cat([*(model.fc_norm(output[:, 0]) for output in outputs[-3:]), means[-1]], dim=1)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sizes", [{"depth": 5}, {"depth": 2}], ids=["deep", "shallow"])
def test_features_are_those_of_a_plain_pass(family: str, sizes: dict[str, Any]) -> None:
    model = model_of(family, **sizes)
    pixels = pictures(model)
    with torch.no_grad():
        output = model(pixels, transfer=True)
        torch.testing.assert_close(output.embeddings["transfer"], plain_features(model, pixels))
        torch.testing.assert_close(output.logits, model(pixels).logits)
    assert output.embeddings["transfer"].shape == (3, embedding_width(model.config, "transfer"))


@pytest.mark.parametrize(
    "changes", [{}, {"class_token": False}, {"norm_after_pool": True}], ids=str
)
def test_a_head_may_read_transfer_features(changes: dict[str, Any]) -> None:
    model = model_of("plain", pool="transfer", depth=5, **changes)
    pixels = pictures(model)
    with torch.no_grad():
        output = model(pixels, transfer=True)
        features = plain_features(model, pixels)
    torch.testing.assert_close(output.embeddings["head"], features)
    torch.testing.assert_close(output.logits, model.head(features))
    assert embedding_width(model.config) == features.shape[1]


def test_transfer_features_are_not_projected() -> None:
    with pytest.raises(ValidationError, match="pool 'transfer' allows no projection_width"):
        model_of("plain", pool="transfer", projection_width=8)
