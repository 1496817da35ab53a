"""Kept graphs give the same answers without torch, and any change invalidates them."""

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from model.checkpoint import Checkpoint, load_checkpoint, native
from model.checkpoint.local_files import recording
from model.description import Description
from model.errors import CheckpointChanged
from model.outputs import EmbeddingRequest, MapRequest, RequestedOutputs
from model.runtime.openvino.kept import Keep, KeptEntry
from model.runtime.openvino.network import CompiledGraph
from model.runtime.predictor import Predictor
from model.runtime.start import kept_predictor
from tests.model.checkpoint import whole_models
from tests.model.runtime.small_models import make_checkpoint, make_images

pytest.importorskip("openvino")
pytestmark = pytest.mark.timeout(120)  # models are compiled

REQUESTS = [
    RequestedOutputs(3),
    RequestedOutputs(1, MapRequest.attention_row(1), logits=True),
    RequestedOutputs(2, MapRequest("relevance"), embedding=EmbeddingRequest()),
]


def first_start(checkpoint: Path, folder: Path, **settings: object) -> Predictor:
    with recording() as files:
        loaded = load_checkpoint(str(checkpoint))
    keep = Keep(KeptEntry(folder, settings), files)
    predictor = Predictor(loaded, device="cpu", dtype="float32", threads=1, max_batch=4, keep=keep)
    predictor.warm_up()
    return predictor


def later_start(checkpoint: Path, folder: Path, **settings: object) -> Predictor | None:
    return kept_predictor(
        KeptEntry(folder, settings),
        lambda: load_checkpoint(str(checkpoint)),
        max_batch=4,
        threads=1,
    )


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    native.write(folder, make_checkpoint())
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "graphs"


def entries(folder: Path) -> list[Path]:
    return [place for place in folder.iterdir() if place.is_dir()]


def wait_for_relevance() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("openvino-prepare"):
            thread.join()


def test_a_later_start_answers_the_same(checkpoint: Path, folder: Path) -> None:
    first = first_start(checkpoint, folder)
    first.predict(make_images(3), REQUESTS)
    wait_for_relevance()
    later = later_start(checkpoint, folder)
    assert later is not None
    later.warm_up()
    for name in (
        "device",
        "dtype",
        "backend",
        "backend_reason",
        "parameters",
        "max_batch",
        "streams",
        "compiled",
    ):
        assert getattr(later, name) == getattr(first, name), name
    for name in Description.__dataclass_fields__:
        assert getattr(later.checkpoint, name) == getattr(first.checkpoint, name), name
    answers = (predictor.predict(make_images(3), REQUESTS) for predictor in (later, first))
    for ours, theirs in zip(*answers, strict=True):
        np.testing.assert_array_equal(ours.indices, theirs.indices)
        np.testing.assert_allclose(ours.scores, theirs.scores, atol=1e-6)
        assert (ours.map is None, ours.embedding is None) == (
            theirs.map is None,
            theirs.embedding is None,
        )
        if ours.map is not None and theirs.map is not None:
            np.testing.assert_allclose(ours.map.values, theirs.map.values, atol=1e-5)


def test_a_warm_start_has_its_text_tower(tmp_path: Path, folder: Path) -> None:
    checkpoint = tmp_path / "clip"
    reads = list[Checkpoint]()
    whole_models.clip(checkpoint)
    first = first_start(checkpoint, folder)

    def read() -> Checkpoint:
        reads.append(load_checkpoint(str(checkpoint)))
        return reads[-1]

    later = kept_predictor(KeptEntry(folder, {}), read, max_batch=4, threads=1)
    assert later is not None
    assert reads == []
    later.warm_up()
    assert len(reads) == 1
    np.testing.assert_array_equal(
        later.embed_texts(["a red car"]), first.embed_texts(["a red car"])
    )
    assert len(reads) == 1


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a checkpoint and the folder of its kept graph, which tests copy."""
    root = tmp_path_factory.mktemp("started")
    native.write(root / "checkpoint", make_checkpoint())
    first_start(root / "checkpoint", root / "graphs")
    return root / "checkpoint", root / "graphs"


def damage(place: Path) -> None:
    with (place / "graph.bin").open("r+b") as file:
        file.seek(50)
        file.write(b"\1\2\3")


def foreign_key(place: Path) -> None:
    path = place / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"key": "of other versions"}))


@pytest.mark.parametrize(
    "change",
    [
        damage,
        foreign_key,
        lambda place: place.chmod(0o777),
        lambda place: (place / "manifest.json").write_text("{}"),
        lambda place: (place / "reference.safetensors").unlink(),
    ],
    ids=["damaged", "of other versions", "open to all", "empty manifest", "without a reference"],
)
def test_a_changed_entry_is_not_used(
    change: Callable[[Path], object],
    started: tuple[Path, Path],
    folder: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    checkpoint, graphs = started
    shutil.copytree(graphs, folder)
    change(KeptEntry(folder, {}).path())
    assert later_start(checkpoint, folder) is None
    assert "a graph that is not used and is made again" in caplog.text


def test_other_settings_make_a_new_graph(checkpoint: Path, folder: Path) -> None:
    first_start(checkpoint, folder, dtype="float32")
    assert later_start(checkpoint, folder, dtype="float32") is not None
    assert later_start(checkpoint, folder, dtype="bfloat16") is None
    (checkpoint / "notes.txt").write_text("a file beside the others")
    assert later_start(checkpoint, folder, dtype="float32") is None


def test_changed_files_refuse_torchs_outputs(checkpoint: Path, folder: Path) -> None:
    first_start(checkpoint, folder)
    later = later_start(checkpoint, folder)
    assert later is not None
    tensors = {name: tensor + 1 for name, tensor in make_checkpoint().tensors.items()}
    shutil.rmtree(checkpoint)
    native.write(checkpoint, make_checkpoint(tensors=tensors))
    with pytest.raises(CheckpointChanged, match="changed since the start"):
        later.predict(make_images(1), RequestedOutputs(1, MapRequest("gae")))
    assert later.predict(make_images(1), RequestedOutputs(1))[0].finite, "its graph goes on"


def test_the_longest_unused_entry_goes(
    checkpoint: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_start(checkpoint, folder, number=1)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    first_start(checkpoint, folder, number=2)
    for number, used in ((1, 2_000_000_000), (2, 1_000_000_000)):
        os.utime(KeptEntry(folder, {"number": number}).path(), (used, used))
    monkeypatch.setattr("model.runtime.openvino.kept.LIMIT", 2 * size + size // 2)
    first_start(checkpoint, folder, number=3)
    kept = [
        number for number in (1, 2, 3) if later_start(checkpoint, folder, number=number) is not None
    ]
    assert kept == [1, 3]


def test_an_unwritable_folder_is_one_line(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    predictor = first_start(checkpoint, tmp_path / "file" / "graphs")
    assert predictor.predict(make_images(1), RequestedOutputs(1))[0].finite
    assert (
        "the graph is not kept (VIT_CACHE_DIR names the folder), and is made again" in caplog.text
    )


def test_a_killed_writers_files_are_removed(checkpoint: Path, folder: Path) -> None:
    abandoned = folder / ".abandoned"
    abandoned.mkdir(mode=0o700, parents=True)
    (abandoned / "graph.bin").write_bytes(bytes(1000))
    first_start(checkpoint, folder)
    assert not abandoned.exists()
    assert later_start(checkpoint, folder) is not None


def test_a_wrong_graph_is_not_kept(
    checkpoint: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> list[list[np.ndarray]]:
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(CompiledGraph, "infer_on_all", fails)
    assert first_start(checkpoint, folder).backend.startswith("torch ")
    assert entries(folder) == []
