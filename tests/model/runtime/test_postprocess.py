"""The output of a batch packed into one tensor, and back."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.checkpoint import Checkpoint
from model.config import PreprocessConfig, ViTConfig
from model.runtime.batches import BatchOutputs, BatchRequest
from model.runtime.postprocess import TopK, pack, unpack
from model.runtime.scores import Scores

CONFIG = ViTConfig(image_size=(2, 3), patch_size=1, width=8, depth=2, heads=4, mlp_width=8, num_classes=9)


def outputs(attention: bool = True, relevance: bool = True) -> BatchOutputs[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand((3, 4), generator=generator)
    scores[1] = torch.tensor([float("nan"), float("inf"), -0.0, 1e-42])
    return BatchOutputs(
        attention=torch.rand((3, 2, CONFIG.heads, CONFIG.tokens), generator=generator) if attention else None,
        relevance=torch.randn((3, CONFIG.tokens), generator=generator) if relevance else None,
        scores=scores,
        indices=torch.randint(0, 2**31 - 1, (3, 4), generator=generator),
        finite=torch.tensor([True, False, True]),
    )


@pytest.mark.parametrize("attention", [True, False])
@pytest.mark.parametrize("relevance", [True, False])
def test_what_is_unpacked_is_what_was_packed_bit_for_bit(attention: bool, relevance: bool) -> None:
    packed = pack(outputs(attention, relevance))
    found = unpack(packed, BatchRequest(4, layers=(0, 1) if attention else (), relevance=relevance), CONFIG).tensors()

    assert packed.dtype is torch.int32
    expected = outputs(attention, relevance).tensors()
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert found[name].numpy().tobytes() == tensor.numpy().tobytes()


def test_nothing_unpacked_changes_when_the_memory_is_used_again() -> None:
    packed = pack(outputs())
    found = unpack(packed, BatchRequest(4, layers=(0, 1), relevance=True), CONFIG).tensors()
    packed.zero_()
    for name, tensor in outputs().tensors().items():
        assert found[name].numpy().tobytes() == tensor.numpy().tobytes()


def checkpoint(classes: int, temperature: float, multi_label: bool) -> Checkpoint:
    config = ViTConfig(image_size=(2, 3), patch_size=1, width=8, depth=2, heads=4, mlp_width=8, num_classes=classes)
    preprocess = PreprocessConfig(
        size=(2, 3), resize="squash", resize_size=(2, 3), interpolation="nearest", mean=(0.5,) * 3, std=(0.5,) * 3
    )
    labels = tuple(map(str, range(classes)))
    return Checkpoint("m", "m", "made", "vit", config, preprocess, labels, {}, temperature, multi_label)


def postprocess(classes: int, *, temperature: float = 1.0, multi_label: bool = False) -> Scores:
    return Scores(checkpoint(classes, temperature, multi_label))


def evidence_of(logits: list[float], post: Scores) -> list[float]:
    """The evidence of every class of one image."""
    rows = np.array([logits] * len(logits), dtype=np.float32)
    evidence: list[float] = post.evidence(rows, np.arange(len(logits)))[1].tolist()
    return evidence


LOGITS = st.lists(st.integers(-2000, 2000).map(lambda number: number / 64), min_size=2, max_size=12)


@settings(deadline=None)
@given(LOGITS, st.data(), st.sampled_from([1.0, 0.25, 3.0]))
def test_evidence_is_on_one_scale_that_rises_with_the_logit_up_to_the_best_class(
    logits: list[float], data: st.DataObject, temperature: float
) -> None:
    post = postprocess(len(logits), temperature=temperature)
    evidence = evidence_of(logits, post)
    assert all(0 <= each <= 1 for each in evidence)
    assert evidence[int(np.argmax(logits))] == 1
    assert [evidence[place] for place in np.argsort(logits, kind="stable")] == sorted(evidence)
    shift = data.draw(st.integers(-64, 64))
    assert evidence_of([each + shift for each in logits], post) == pytest.approx(evidence, abs=1e-5)
    place = data.draw(st.integers(0, len(logits) - 1))
    raised = [*logits[:place], logits[place] + data.draw(st.integers(1, 640)) / 64, *logits[place + 1 :]]
    assert evidence_of(raised, post)[place] >= evidence[place] - 1e-6


def test_a_class_that_is_ruled_out_has_none_and_one_that_shares_the_score_has_all() -> None:
    assert evidence_of([8.0, 4.0, -2.0, -10.0], postprocess(4)) == pytest.approx([1, 0.25, 0, 0], abs=1e-4)
    assert evidence_of([3.0, 3.0], postprocess(2)) == [1, 1], "two classes, between which the mean always lies"
    assert evidence_of([3.0, 2.0], postprocess(2)) == pytest.approx([1, np.exp(-1)])
    assert evidence_of([0.0] * 5, postprocess(5)) == [1] * 5


def test_where_scores_are_independent_the_evidence_is_the_score() -> None:
    logits = np.array([[4.0, -2.0, 0.0]], dtype=np.float32)
    post = postprocess(3, temperature=2.0, multi_label=True)
    score, evidence = post.evidence(logits.repeat(3, axis=0), np.arange(3))
    np.testing.assert_allclose(evidence, torch.from_numpy(logits[0] / 2).sigmoid().numpy(), rtol=1e-6)
    np.testing.assert_array_equal(score, evidence)
    np.testing.assert_array_equal(post.best_evidence(score), score)
    np.testing.assert_array_equal(postprocess(3).best_evidence(score), np.ones(3))


@pytest.mark.parametrize("multi_label", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.3])
@pytest.mark.parametrize("top_k", [1, 5, 100])
def test_scores_on_the_host_are_those_of_a_device(multi_label: bool, temperature: float, top_k: int) -> None:
    logits = np.random.default_rng(0).normal(0, 8, (6, 100)).astype(np.float32)
    logits[1, 3], logits[2, 4], logits[3] = np.inf, np.nan, 1e30
    scores = postprocess(100, temperature=temperature, multi_label=multi_label)
    found = scores(BatchOutputs(logits), top_k)
    expected = TopK(checkpoint(100, temperature, multi_label))(BatchOutputs(torch.from_numpy(logits)), top_k).tensors()
    assert found.finite is not None
    assert found.scores is not None
    assert found.indices is not None
    np.testing.assert_array_equal(found.finite, expected["finite"].numpy())
    clear = [0, 4, 5]
    np.testing.assert_allclose(found.scores[clear], expected["scores"].numpy()[clear], rtol=2e-6, atol=1e-7)
    # Of classes whose scores are the same, the first is the one with the higher logit.
    chosen = np.take_along_axis(scores.scores(logits), found.indices, axis=1)
    np.testing.assert_array_equal(chosen[clear], found.scores[clear])
    assert (np.diff(np.take_along_axis(logits, found.indices, axis=1)[clear]) <= 0).all()
    assert [str(each.dtype) for each in (found.scores, found.indices)] == ["float32", "int64"]
