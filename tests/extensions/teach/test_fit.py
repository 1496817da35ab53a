"""The fit of a taught head: answers, statistics, and turns."""

import json
import sqlite3
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from numpy.typing import NDArray

from model.errors import CheckpointError, DatasetError
from model.extensions.taught.known_examples import KnownExamples
from model.extensions.taught.taught_heads import TaughtHead
from service.extensions.teach import fit as module
from service.extensions.teach.examples import Examples
from service.extensions.teach.fit import fit_changed, taught_head
from tests.extensions.teach.clusters import LABELS, pictures, taught, teach
from vitserve.head_documents import Knowledge


def test_a_head_answers_unseen_pictures() -> None:
    (head, *_), known = taught()
    features, labels = pictures(50, seed=1)
    assert head.labels == LABELS
    answers = [LABELS[place] for place in head.logits(features).argmax(axis=1)]
    assert np.mean([answer == label for answer, label in zip(answers, labels, strict=True)]) > 0.98
    assert known.accuracy is not None
    assert (known.accuracy.value, known.accuracy.high, known.fitted_to) == (1.0, 1.0, 30)
    assert 0.85 < known.accuracy.low < 0.9, "thirty right ones are no proof of more"
    assert (known.confusion, known.suspects, known.needs_more) == ([], [], [])


def test_far_pictures_are_told_from_near() -> None:
    (head, *_), _ = taught()
    assert isinstance(head.known, KnownExamples)
    assert head.known.are_far(pictures(100, seed=1)[0]).mean() < 0.1
    elsewhere = np.roll(pictures(100, seed=2)[0], 5, axis=1)
    assert head.known.are_far(elsewhere).mean() > 0.9


def test_copies_make_no_picture_far() -> None:
    features, _ = pictures(6)
    rounding = 1 + 1e-7 * np.arange(90)[:, np.newaxis]
    labels = np.arange(90) // 30
    known = KnownExamples.of((np.repeat(features, 5, axis=0) * rounding).astype(np.float32), labels)
    assert known.are_far(pictures(50, seed=1)[0]).mean() < 0.3
    two = KnownExamples.of(np.repeat(features[[0, 6]], 4, axis=0), np.arange(8) // 4)
    assert not two.are_far(features[[0, 6]]).any()


def test_limit_ignores_a_lone_example() -> None:
    """The only example of a label is far from all others."""
    features = np.random.default_rng(0).normal(size=(9, 6)).astype(np.float32)
    features[:, 0] += 5
    features[8] = [0, 0, 0, 0, 0, 9]
    truth = np.array([0, 0, 0, 0, 1, 1, 1, 1, 2])
    assert (
        KnownExamples.of(features, truth).limit == KnownExamples.of(features[:8], truth[:8]).limit
    )


def test_a_wrong_label_is_the_first_suspect() -> None:
    features, labels = pictures(10)
    labels[4] = "cow"
    labels[23] = "dog"
    known = Knowledge.model_validate_json(
        taught_head(features, labels, range(101, 131), "b", "deit").statistics
    )
    assert {(each.number, each.label, each.likely) for each in known.suspects} == {
        (105, "cow", "cat"),
        (124, "dog", "cow"),
    }
    assert all(each.score > 0.5 for each in known.suspects)
    assert {(each.label, each.answered, each.count) for each in known.confusion} >= {
        ("cow", "cat", 1)
    }


def test_labels_with_few_pictures_need_more() -> None:
    features, labels = pictures(10)
    kept = [place for place, label in enumerate(labels) if label != "cow" or place == 20]
    head = taught_head(features[kept], [labels[place] for place in kept], kept, "b", "deit")
    known = Knowledge.model_validate_json(head.statistics)
    assert known.needs_more == ["cow"]
    assert head.head.labels == LABELS, "one picture of a label is enough for it to be answered"


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_features_that_are_not_finite_are_named(value: float) -> None:
    features = np.eye(4, dtype=np.float32)
    features[2, 1] = value
    with pytest.raises(DatasetError, match="of example 12 are not finite: remove it"):
        taught_head(features, ["a", "a", "b", "b"], range(10, 14), "b", "deit")


@pytest.mark.parametrize(
    "labels", [[], ["cat"] * 4, ["cat", "cat", "dog"]], ids=["none", "one label", "one dog"]
)
def test_too_few_examples_are_refused(labels: list[str]) -> None:
    with pytest.raises(DatasetError, match="two labels with two pictures each"):
        taught_head(np.ones((len(labels), 4), np.float32), labels, range(len(labels)), "b", "deit")


def test_a_file_holds_all_of_a_head(tmp_path: Path) -> None:
    written, _ = taught()
    read = TaughtHead.from_bytes(written.to_bytes(), "pets")
    features = pictures(5, seed=3)[0]
    assert np.array_equal(read.head.logits(features), written.head.logits(features))
    assert isinstance(read.head.known, KnownExamples)
    assert isinstance(written.head.known, KnownExamples)
    assert np.array_equal(
        read.head.known.distances(features), written.head.known.distances(features)
    )
    assert read.head.known.examples.dtype == np.float32, "it is not converted for each picture"
    assert (read.head.labels, read.head.temperature) == (LABELS, written.head.temperature)
    assert read[1:] == written[1:]
    content = written.to_bytes()
    size = int.from_bytes(content[:8], "little")
    other = json.loads(content[8 : 8 + size])
    other["__metadata__"]["labels"] = '["cat"]'
    header = json.dumps(other).encode()
    fewer = len(header).to_bytes(8, "little") + header + content[8 + size :]
    for damaged in (b"", content[:100], content[:-1], fewer):
        with pytest.raises(CheckpointError, match=r"^pets: not a taught head, or damaged"):
            TaughtHead.from_bytes(damaged, "pets")


def test_a_missing_part_of_a_head_is_named() -> None:
    written, _ = taught()
    content = written.to_bytes().replace(b'"temperature"', b'"temperaturx"')
    with pytest.raises(CheckpointError, match="damaged: temperature: Field required"):
        TaughtHead.from_bytes(content, "pets")


def test_each_changed_head_is_fitted_once(tmp_path: Path) -> None:
    store = Examples(tmp_path)
    teach(store, 6)
    store.add("few", "cat", pictures(1)[0][:1], "", ("b", "deit"))
    fit_changed(store)
    pets = store.head("pets")
    few = store.head("few")
    assert pets.fitted_revision == pets.revision == 3
    assert few.fitted_revision == few.revision
    assert few.reason.startswith("needs at least two labels with two pictures each")
    first = store.state(pets)[1]
    assert first is not None
    fit_changed(store)
    assert store.state(pets)[1] == first, "its date is in it"
    store.remove(pets, 1)
    fit_changed(store)
    again = store.state(pets)[1]
    assert again is not None
    assert json.loads(TaughtHead.from_bytes(again, "pets").statistics)["fitted_to"] == 17


def test_deleted_examples_leave_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Examples(tmp_path)
    features, labels = pictures(3)
    for row, label in zip(features, labels, strict=True):
        store.add("pets", label, row[np.newaxis], "", ("b", "deit"))
    fit_changed(store)
    first = store.state(store.head("pets"))[1]
    store.remove(store.head("pets"), 9)
    with monkeypatch.context() as context:
        context.setattr(module, "taught_head", Mock(side_effect=MemoryError("no memory")))
        fit_changed(store)
    assert (store.state(store.head("pets"))[1], store.head("pets").reason) == (first, "no memory")
    for number in range(1, 8):
        store.remove(store.head("pets"), number)
    fit_changed(store)
    assert store.state(store.head("pets"))[1] is None
    assert features[0].tobytes() not in store.database.path.read_bytes()


def test_an_unusable_folder_is_one_line(tmp_path: Path) -> None:
    teach(Examples(tmp_path))
    with sqlite3.connect(tmp_path / "heads.sqlite3") as db:
        db.execute("ALTER TABLE examples RENAME COLUMN features TO other")
    command = [sys.executable, "-m", "service.extensions.teach.fit", str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr.count("\n")) == (1, 1)
    assert "ERROR   taught heads cannot be read or written: no such column: " in ended.stderr


def test_the_smallest_head_is_fitted_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Examples(tmp_path)
    fitted = list[int]()
    for head, count in (("large", 9), ("small", 2), ("middle", 5)):
        store.add(head, "cat", pictures(count)[0], "", ("b", "deit"))

    def fit(features: NDArray[np.float32], *_: object) -> None:
        fitted.append(len(features))
        raise DatasetError("")

    monkeypatch.setattr(module, "taught_head", fit)
    fit_changed(store)
    assert fitted == [6, 15, 27]


def test_fits_of_all_heads_rest_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Examples(tmp_path)
    state = Mock(now=0.0, worked=0.0)
    begun = list[tuple[str, float]]()
    names = ("pets", "cars", "birds")

    def sleep(seconds: float) -> None:
        state.now += seconds
        if state.now < 60:
            for name in names:
                store.add(name, "cat", pictures(1, seed=int(1000 * state.now))[0], "", ("b", name))

    def fit(
        features: NDArray[np.float32], labels: object, numbers: object, backbone: str, model: str
    ) -> None:
        begun.append((model, state.now))
        state.now += 3  # other processes had the processor for a second
        state.worked += 2
        raise DatasetError("")

    monkeypatch.setattr(module, "_LOOK_SECONDS", 1.0)
    monkeypatch.setattr(module, "taught_head", fit)
    for name in names:
        store.add(name, "cat", pictures(1)[0], "", ("b", name))
    clock = Mock(
        monotonic=lambda: state.now,
        process_time=lambda: state.worked,
        sleep=sleep,
    )
    monkeypatch.setattr(module, "time", clock)
    fit_changed(store, 0.2, 10.0)
    assert np.diff([start for _, start in begun]) == pytest.approx(11)
    assert [name for name, _ in begun[:6]] == [*names, *names], "each has its turn"
    assert all(head.fitted_revision == head.revision for head in store.heads().values())
    assert state.now == pytest.approx(begun[-1][1] + 13), "it waits for a change"
