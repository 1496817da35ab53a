from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from model.errors import InputError
from model.insight.analyses import position_similarity
from model.network.vit import VisionTransformer
from tests.model.insight.models import random_model


@pytest.mark.parametrize(
    "changes", [{}, {"registers": 2}, {"position_prefix": False}, {"class_token": False, "pool": "mean"}], ids=str
)
def test_position_similarity_leaves_the_prefix_out_and_keeps_rows_and_columns(changes: dict[str, Any]) -> None:
    model = random_model(**changes)
    assert model.pos_embed is not None
    found = position_similarity(model)
    assert found.shape == (3, 5, 3, 5)
    patches = model.pos_embed[0, -15:]
    for i, j, k, m in ((0, 0, 0, 0), (1, 4, 2, 0), (2, 3, 0, 1)):
        expected = torch.cosine_similarity(patches[5 * i + j], patches[5 * k + m], dim=0)
        assert found[i, j, k, m].item() == pytest.approx(expected.item(), abs=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"position_embedding": "sincos2d"}, "sincos2d"),
        ({"position_embedding": "none"}, "none"),
        ({"position_embedding": "none", "relative_position_bias": True}, "relative biases"),
    ],
    ids=["fixed", "none", "relative"],
)
def test_positions_that_were_not_learned_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        position_similarity(random_model(**changes))


@pytest.mark.shared
def test_a_trained_model_places_each_position_next_to_itself_its_row_and_its_column(deit: VisionTransformer) -> None:
    found = position_similarity(deit).numpy()
    gh, gw = deit.config.grid
    flat = found.reshape(gh * gw, gh * gw)
    assert (flat.argmax(axis=1) == np.arange(gh * gw)).all()
    row, column = np.divmod(np.arange(gh * gw), gw)
    itself = np.eye(gh * gw, dtype=bool)
    same_row = (row[:, None] == row) & ~itself
    same_column = (column[:, None] == column) & ~itself
    neither = ~(same_row | same_column | itself)
    for mates in (same_row, same_column):  # of every single position, not only on average
        with_mates = (flat * mates).sum(1) / mates.sum(1)
        with_others = (flat * neither).sum(1) / neither.sum(1)
        assert (with_mates > with_others + 0.2).all()
    neighbour = np.abs(row[:, None] - row) + np.abs(column[:, None] - column) == 1
    assert flat[neighbour].min() > 0.8
