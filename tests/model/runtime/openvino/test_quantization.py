"""How a network is computed in int8: which products get which way, and what comes of it."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model.errors import DeviceError
from model.runtime.openvino.quantization import (
    Quantised,
    Quantiser,
    Way,
    compare,
    fewest,
    graph_logits,
    int8_graph,
    steps_of,
)
from tests.model.runtime.openvino.test_int8 import make, traced_graph
from tests.service.cli.command_line import run, write_checkpoint

needs_openvino = pytest.mark.skipif(importlib.util.find_spec("openvino") is None, reason="openvino is not installed")


def test_agreement_counts_equal_best_classes_and_the_divergence_is_that_of_the_softmax() -> None:
    reference = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]], np.float32))
    same = compare(reference + 3, reference)
    assert same.agreement == 1
    assert same.kl == pytest.approx(0, abs=1e-6)
    other = compare(np.log(np.array([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]], np.float32)), reference)
    assert other.agreement == 0.5
    assert other.kl == pytest.approx(0.25 * np.log(2) / 2, abs=1e-6)


@pytest.mark.parametrize(("most", "enough"), [(0, 0), (1, 1), (7, 3), (75, 75), (75, 1), (75, 99)])
def test_the_fewest_steps_that_suffice_are_found_in_few_trials(most: int, enough: int) -> None:
    tried: list[int] = []

    def suffices(count: int) -> bool:
        tried.append(count)
        return count >= enough

    assert fewest(most, suffices) == min(most, enough)
    assert len(tried) <= 7


@pytest.mark.parametrize(
    ("errors", "steps"),
    [
        # A tenth of a product's time for 0.6, then three tenths for 0.3.
        ({Way.STATIC: 0.9, Way.DYNAMIC: 0.3, Way.FLOATING: 0.0}, [(Way.DYNAMIC, 6), (Way.FLOATING, 1)]),
        # The first of two would bring less: both at once.
        ({Way.STATIC: 0.9, Way.DYNAMIC: 0.85, Way.FLOATING: 0.0}, [(Way.FLOATING, 2.25)]),
        ({Way.STATIC: 0.9, Way.FLOATING: 0.0}, [(Way.FLOATING, 2.25)]),
    ],
)
def test_the_steps_of_a_product_are_in_the_order_of_what_they_bring(
    errors: dict[Way, float], steps: list[tuple[Way, float]]
) -> None:
    found = steps_of("fc1", 1, errors)
    assert [(step.name, step.way) for step in found] == [("fc1", way) for way, _ in steps]
    assert [step.gain for step in found] == pytest.approx([gain for _, gain in steps])
    assert steps_of("fc1", 2, errors)[0].gain == pytest.approx(steps[0][1] / 2)


@needs_openvino
def test_each_way_rounds_what_it_says_and_the_logits_are_close(tmp_path: Path) -> None:
    graph = traced_graph(make(tmp_path / "checkpoint"))
    images = np.random.default_rng(0).integers(0, 256, (10, 16, 16, 3), np.uint8)
    expected = graph_logits(graph, "float32", images, 1)
    quantiser = Quantiser(graph, "float32", images, threads=1)
    products = quantiser.quantise(0)
    assert {each.way for each in products.values()} == {Way.STATIC}
    found: dict[Way, tuple[set[str], float]] = {}
    for way in Way:
        changed = int8_graph(graph, {name: each._replace(way=way) for name, each in products.items()})
        types = {str(each.element_type.get_type_name()) for op in changed.get_ops() for each in op.outputs()}
        logits = graph_logits(changed, "float32", images, 1)
        assert len(changed.outputs) == 1
        found[way] = types & {"i8"}, float(np.linalg.norm(logits - expected) / np.linalg.norm(expected))
        ranges = sum(op.get_type_name() == "FakeQuantize" for op in changed.get_ops())
        assert ranges == (len(products) if way is Way.STATIC else 0)
    assert found[Way.FLOATING] == (set(), 0)
    assert found[Way.STATIC][0] == {"i8"}
    assert 0 < found[Way.DYNAMIC][1] < found[Way.STATIC][1] < 0.2


@needs_openvino
def test_a_finer_agreement_takes_more_products_out_of_int8(tmp_path: Path) -> None:
    graph = traced_graph(make(tmp_path / "checkpoint"))
    images = np.random.default_rng(0).integers(0, 256, (10, 16, 16, 3), np.uint8)
    quantiser = Quantiser(graph, "float32", images, threads=1)
    counts = [sum(each.way for each in quantiser.quantise(least).values()) for least in (0.5, 0.9985)]
    assert counts == sorted(set(counts))
    with pytest.raises(DeviceError, match=r"no product of this network may be in int8 for 100\.00%"):
        quantiser.quantise(1)


@needs_openvino
def test_products_of_another_graph_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=r"another graph, as of another OpenVINO: convert again \("):
        int8_graph(traced_graph(make(tmp_path / "checkpoint")), {"fc1": Quantised(Way.STATIC, -1, 1)})


def test_pictures_for_nothing_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", ("cat", "dog"))
    code, _, error = run(capsys, "convert", checkpoint, "-o", tmp_path / "out", "--data", tmp_path)
    assert (code, error) == (1, "vitserve: --data is for --dtype int8\n")


@needs_openvino
@pytest.mark.timeout(120)
def test_convert_writes_a_folder_that_is_served_in_int8(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL import Image

    from model.checkpoint import load_checkpoint
    from model.runtime import int8
    from model.runtime.predictor import Predictor

    monkeypatch.setattr(int8, "cpu_has_int8", lambda: True)
    checkpoint, pictures = write_checkpoint(tmp_path / "checkpoint", ("cat", "dog")), tmp_path / "pictures"
    pictures.mkdir()
    for number in range(12):
        noise = np.random.default_rng(number).integers(0, 256, (40, 40, 3), np.uint8)
        Image.fromarray(noise).save(pictures / f"{number}.png")
    flags = ["--dtype", "int8", "--data", pictures, "--agreement", "0"]
    code, out, error = run(capsys, "convert", checkpoint, "-o", tmp_path / "out", *flags)
    assert code == 0, error
    assert "int8: float32's best class on " in out
    products: dict[str, Any] = json.loads((tmp_path / "out" / "int8.json").read_text())["products"]
    assert {each["way"] for each in products.values()} == {"static"}
    found = Predictor(
        load_checkpoint(str(tmp_path / "out")), device="cpu", dtype="int8", max_batch=1, least_agreement=0
    )
    assert (found.dtype, found.audits) == ("int8", True)
