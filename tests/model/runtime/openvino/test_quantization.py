"""How a graph in int8 is made: what is measured of it, and which inputs of products are left without a scale."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model.runtime.openvino.quantization import _fewest, by_cost, compare, graph_logits, without_all_scales
from tests.service.cli.command_line import run, write_checkpoint

needs_nncf = pytest.mark.skipif(importlib.util.find_spec("nncf") is None, reason="nncf is not installed: extra int8")


def test_agreement_counts_equal_best_classes_and_the_divergence_is_that_of_the_softmax() -> None:
    reference = np.log(np.array([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]], np.float32))
    same = compare(reference + 3, reference)
    assert same.agreement == 1
    assert same.kl == pytest.approx(0, abs=1e-6)
    other = compare(np.log(np.array([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]], np.float32)), reference)
    assert other.agreement == 0.5
    assert other.kl == pytest.approx(0.25 * np.log(2) / 2, abs=1e-6)


@pytest.mark.parametrize(("most", "enough"), [(0, 0), (1, 0), (1, 1), (7, 3), (75, 75), (75, 1), (75, 99)])
def test_the_fewest_inputs_that_suffice_are_found_in_few_trials(most: int, enough: int) -> None:
    tried: list[int] = []

    def suffices(count: int) -> bool:
        tried.append(count)
        return count >= enough

    assert _fewest(most, suffices) == min(most, enough)
    assert len(tried) <= 8


def test_inputs_are_ordered_by_what_each_costs_and_only_costly_kinds_are_looked_at_one_by_one() -> None:
    inputs = {"b0.fc2": "bN.fc2", "b1.fc2": "bN.fc2", "b0.qkv": "bN.qkv", "b1.qkv": "bN.qkv", "head": "head"}
    own = {"b0.fc2": 0.001, "b1.fc2": 0.5, "b0.qkv": 0.003, "b1.qkv": 0.001, "head": 0.005}
    asked: list[list[str]] = []

    def cost(kept: Iterable[str]) -> float:
        asked.append(sorted(kept))
        return 0.01 + sum(own[name] for name in kept)

    order = by_cost(inputs, cost, 0.01, lambda line: None)
    assert order == ["b1.fc2", "head", "b0.qkv", "b1.qkv", "b0.fc2"]
    assert ["b0.fc2"] in asked
    assert ["b0.qkv"] not in asked


@pytest.mark.skipif(importlib.util.find_spec("nncf") is not None, reason="nncf is installed")
def test_convert_says_what_is_missing_before_it_writes_anything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", ("cat", "dog"))
    code, _, error = run(capsys, "convert", checkpoint, "-o", tmp_path / "out", "--dtype", "int8", "--data", tmp_path)
    assert (code, error) == (
        1,
        "vitserve: int8: it needs the package nncf: pip install -e '.[int8]' in the clone\n",
    )
    assert not (tmp_path / "out").exists()


def test_pictures_for_nothing_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", ("cat", "dog"))
    code, _, error = run(capsys, "convert", checkpoint, "-o", tmp_path / "out", "--data", tmp_path)
    assert (code, error) == (1, "vitserve: --data is for --dtype int8\n")


@needs_nncf
@pytest.mark.timeout(200)
def test_convert_writes_a_folder_that_is_served_in_int8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from PIL import Image

    from model.checkpoint import load_checkpoint
    from model.runtime.predictor import Predictor

    checkpoint, pictures = write_checkpoint(tmp_path / "checkpoint", ("cat", "dog")), tmp_path / "pictures"
    pictures.mkdir()
    for number in range(12):
        noise = np.random.default_rng(number).integers(0, 256, (40, 40, 3), np.uint8)
        Image.fromarray(noise).save(pictures / f"{number}.png")
    flags = ["--dtype", "int8", "--data", pictures, "--agreement", "0"]
    code, out, error = run(capsys, "convert", checkpoint, "-o", tmp_path / "out", *flags)
    assert code == 0, error
    assert "int8: float32's best class on " in out
    found = Predictor(
        load_checkpoint(str(tmp_path / "out")), device="cpu", dtype="int8", max_batch=1, least_agreement=0
    )
    assert (found.dtype, found.audits) == ("int8", True)
    types = {each.get_type_name() for each in _graph(tmp_path / "out").get_ops()}
    assert "FakeQuantize" in types


@needs_nncf
def test_without_scales_of_inputs_the_weights_are_int8_and_the_logits_are_close(tmp_path: Path) -> None:
    from tests.model.runtime.openvino.test_int8 import logits_graph, make

    graph = logits_graph(make(tmp_path / "checkpoint"))
    found = without_all_scales(graph)
    types = {each.element_type.get_type_name() for op in found.get_ops() for each in op.outputs()}
    assert "u8" in types
    assert "FakeQuantize" not in {each.get_type_name() for each in found.get_ops()}
    images = np.random.default_rng(0).integers(0, 256, (10, 16, 16, 3), np.uint8)
    ours, theirs = (graph_logits(each, "float32", images, 1) for each in (found, graph))
    assert 0 < np.linalg.norm(ours - theirs) < 0.1 * np.linalg.norm(theirs)


def _graph(folder: Path) -> Any:
    from model.runtime.openvino.graph import core

    return core().read_model(folder / "int8.xml")
