"""The file of a taught head names its features; older files keep theirs."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save

from model.errors import CheckpointError
from model.extensions.taught.known_examples import KnownExamples, part_weights
from model.extensions.taught.taught_heads import Features, TaughtHead
from model.heads import Head


def taught(features: Features) -> TaughtHead:
    values = np.random.default_rng(0).standard_normal((6, 8)).astype(np.float32)
    known = KnownExamples.of(values, np.arange(6) % 2, part_weights(features.parts))
    head = Head(("cat", "dog"), False, weight=values[:2], bias=np.zeros(2, np.float32), known=known)
    return TaughtHead(replace(head, features=features.pool), f"b{features.suffix}", "m", "{}")


@pytest.mark.parametrize(
    "features", [Features(), Features("transfer", 4), Features("transfer", 2)], ids=str
)
def test_a_file_names_its_heads_features(features: Features) -> None:
    found = TaughtHead.from_bytes(taught(features).to_bytes(), "a file")
    assert isinstance(found.head.known, KnownExamples)
    assert found.head.features == features.pool
    assert found.head.known.weights == part_weights(features.parts)
    assert Features.named(found.backbone) == features


def without(content: bytes, *names: str) -> bytes:
    size = int.from_bytes(content[:8], "little")
    about = json.loads(content[8 : 8 + size])["__metadata__"]
    return save(load(content), {name: value for name, value in about.items() if name not in names})


def test_older_files_read_the_head_features() -> None:
    older = without(taught(Features()).to_bytes(), "features", "weights")
    found = TaughtHead.from_bytes(older, "a file")
    assert found.head.features == "head"


@pytest.mark.parametrize(
    ("before", "after", "problem"),
    [
        (b'"transfer"', b'"transfix"', "features: expected 'head', 'cls', 'mean' or 'transfer'"),
        (b"[0.5, 1.0,", b"[0.5,     ", "3 weights of parts for 8 features"),
        (b"[0.5,", b"[0.0,", "weights.0: expected greater than 0"),
        (b"[0.5,", b"[NaN,", "weights.0: expected a finite number"),
    ],
)
def test_unusable_features_are_refused(before: bytes, after: bytes, problem: str) -> None:
    content = taught(Features("transfer", 4)).to_bytes()
    assert before in content
    with pytest.raises(CheckpointError, match=problem):
        TaughtHead.from_bytes(content.replace(before, after), "a file")


def test_parts_of_other_lengths_count_alike() -> None:
    features = np.array([[1, 0, 100, 0], [0, 1, 100, 0]], np.float32)
    one = np.zeros(1, np.int32)
    assert KnownExamples(features[:1], one, 0.0).distances(features)[1] < 1e-3, (
        "the long part decides alone"
    )
    known = KnownExamples.of(
        np.concatenate([features[:1], features[:1] + 1e-3 * np.eye(4, dtype=np.float32)]),
        np.zeros(5, np.int64),
        weights=(1, 1),
    )
    assert known.distances(features)[1] == pytest.approx(0.5, abs=0.01)


def test_a_rare_label_keeps_its_examples() -> None:
    features = np.random.default_rng(0).standard_normal((20_000, 8)).astype(np.float32)
    labels = np.zeros(len(features), np.int64)
    labels[10_000:] = 1
    labels[[5, 7, 9]] = 2
    known = KnownExamples.of(features, labels)
    assert np.bincount(known.labels).tolist() == [999, 998, 3]
    assert known.distances(features[[5]])[0] < 1


def test_near_examples_are_of_one_label() -> None:
    angles = np.radians([0, 4, 8, 20, 24, 28])
    examples = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    known = KnownExamples(examples, np.array([0, 0, 0, 1, 1, 1], np.int32), 0.0)
    between = np.radians(13)
    picture = np.array([[np.cos(between), np.sin(between)]], np.float32)
    distance = 1 - np.cos(between - angles[:3]).mean()
    assert known.distances(picture) == pytest.approx([distance], abs=1e-6)
    nearest = np.sort(np.cos(between - angles))[3:]
    older = KnownExamples(examples, np.zeros(6, np.int32), 0.0)
    assert older.distances(picture) == pytest.approx([1 - nearest.mean()], abs=1e-6)
    few = KnownExamples(examples[:4], np.array([0, 0, 0, 1], np.int32), 0.0)
    assert few.distances(picture) == pytest.approx([1 - np.cos(between - angles[3])], abs=1e-6)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"known_labels": np.arange(5, dtype=np.int32)},
            r"known_labels has shape \(5,\), not \(6,\)",
        ),
        ({"known_labels": np.full(6, -1, np.int32)}, "not ascending numbers of labels"),
        ({"known_labels": np.full(6, 2, np.int32)}, "not ascending numbers of labels"),
        ({"known_labels": np.array([0, 1, 0, 1, 0, 1], np.int32)}, "not ascending"),
        ({"known_labels": np.zeros(6)}, "its arrays are .* known_labels float64, .*, not bias"),
        ({"known": np.full((6, 8), 5, np.float16)}, "known examples are longer than 1"),
        ({"more": np.zeros(3)}, "its arrays are bias float32, .* more float64, .*, not bias"),
        ({"temperature": "1e-320"}, "temperature: expected greater than or equal to 0.001"),
        ({"weights": "[true]"}, "weights.0: expected a valid number"),
        ({"weights": '{"1": 2}'}, "weights: expected a valid list"),
        ({"labels": '["cat"]'}, "labels: .* at least 2 items"),
        ({"colour": "blue"}, "colour: unknown name"),
        ({"version": "2"}, "version: expected '1'"),
    ],
)
def test_unusable_parts_of_a_file_are_named(changes: dict[str, Any], problem: str) -> None:
    content = taught(Features()).to_bytes()
    arrays = load(content)
    assert arrays["known_labels"].tolist() == [0, 0, 0, 1, 1, 1]
    metadata = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
    for name, value in changes.items():
        (metadata if isinstance(value, str) else arrays)[name] = value
    with pytest.raises(CheckpointError, match=problem):
        TaughtHead.from_bytes(save(arrays, metadata), "a file")


def test_parts_are_scaled_to_vary_alike() -> None:
    values = np.random.default_rng(1).standard_normal((50, 8)).astype(np.float32) * np.repeat(
        [1, 20], 4
    )
    scales = Features("transfer", 2).scales(values)
    assert scales[4:] / scales[:4] == pytest.approx(20, rel=0.3)
    assert (Features("transfer", 2).scales(np.ones((3, 8), np.float32)) == 1).all()


def test_the_penultimate_token_weighs_most() -> None:
    values = np.random.default_rng(1).standard_normal((500, 8)).astype(np.float32)
    scaled = values / Features("transfer", 4).scales(values)
    assert scaled.std(axis=0)[::2] == pytest.approx([0.5, 1, 0.25, 0.5], rel=0.1)
    example = np.ones((2, 8), np.float32)
    example[1, 0] = 1.01  # a copy would not be a neighbour
    known = KnownExamples.of(example, np.zeros(2, np.int64), part_weights(4))
    turned = np.ones((2, 8), np.float32)
    turned[0, 2:4] = [1, -1]
    turned[1, 4:6] = [1, -1]
    assert known.distances(turned) == pytest.approx([1 / 2.25, 0.25 / 2.25], abs=0.01)
