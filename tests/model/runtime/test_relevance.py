"""Relevance of the best class comes from the classifying pass."""

import pytest
import torch

from model.outputs import (
    MapRequest,
)
from tests.model.explanation.random_models import FAMILIES
from tests.model.runtime.cuda.device_stand_in import StandInOps
from tests.model.runtime.predictions import predict
from tests.model.runtime.relevance_maps import (
    RELEVANCE,
    family_predictor,
    images_for,
    require_explanation,
    require_mixed,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "square"])
@pytest.mark.usefixtures("no_explanations")
def test_a_mixed_batch_needs_no_further_pass(family: str) -> None:
    predictor = family_predictor(family)
    require_mixed(predictor, predictor)


@pytest.mark.usefixtures("no_explanations")
def test_a_captured_graph_gives_it() -> None:
    ops = StandInOps()
    predictor = family_predictor("registers", "openvino", ops=ops, max_batch=8, streams=1)
    predictor.warm_up()
    images = images_for(predictor, 3)
    replays = ops.replays
    found = predict(predictor, images, top_k=1, maps=[None, RELEVANCE, RELEVANCE])
    assert ops.replays == replays + 1
    require_explanation(predictor, images, 1, found)
    require_explanation(predictor, images, 2, found)
    replays = ops.replays
    require_mixed(predictor, family_predictor("registers"))
    assert ops.replays == replays + 3, (
        "images with nothing, with the last row and with relevance; another row has none"
    )


def test_a_named_class_needs_a_further_pass() -> None:
    assert MapRequest("relevance", 0).needs_pass
    assert not RELEVANCE.needs_pass
