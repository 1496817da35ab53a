"""Graphs that are kept: what a later start takes, what it leaves alone, and what becomes of a damaged folder."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model.checkpoint import load_checkpoint
from model.checkpoint.local_files import recording
from model.errors import CheckpointChanged
from model.outputs import MapRequest, RequestedOutputs
from model.runtime.batches import BatchRequest
from model.runtime.kept import kept_predictor
from model.runtime.openvino import store
from model.runtime.openvino.graph import Requests
from model.runtime.openvino.store import Entry, Keep
from model.runtime.predictor import Predictor
from tests.model.runtime.test_predictor import make_checkpoint, make_images

openvino = pytest.importorskip("openvino")
pytestmark = pytest.mark.timeout(120)  # graphs are compiled


@pytest.fixture(scope="module")
def checkpoint_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from model.checkpoint import native

    folder = tmp_path_factory.mktemp("checkpoint")
    native.write(folder, make_checkpoint())
    return folder


def wait_for_keeping() -> None:
    for thread in threading.enumerate():
        if thread.name in ("openvino-keep", "openvino-prepare"):
            thread.join()


def first_start(checkpoint: Path, folder: Path, **settings: object) -> Predictor:
    with recording() as files:
        loaded = load_checkpoint(str(checkpoint))
    keep = Keep(Entry(folder, settings), files)
    predictor = Predictor(loaded, device="cpu", dtype="float32", threads=1, max_batch=2, keep=keep)
    predictor.warm_up()
    wait_for_keeping()
    return predictor


def later_start(checkpoint: Path, folder: Path, **settings: object) -> Predictor | None:
    return kept_predictor(Entry(folder, settings), lambda: load_checkpoint(str(checkpoint)), max_batch=2)


@pytest.fixture(scope="module")
def kept(checkpoint_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Predictor]:
    folder = tmp_path_factory.mktemp("cache") / "graphs"
    return folder, first_start(checkpoint_folder, folder)


@pytest.fixture
def copied(kept: tuple[Path, Predictor], tmp_path: Path) -> Path:
    """Return the only entry of a folder that a test may damage."""
    copy = tmp_path / "graphs"
    subprocess.run(["cp", "-r", kept[0], copy], check=True)
    [place] = copy.iterdir()
    return place


REQUESTS = [RequestedOutputs(3), RequestedOutputs(1, MapRequest.row(1), logits=True)]


def answers(predictor: Predictor, requests: list[RequestedOutputs]) -> list[bytes]:
    outputs = predictor.predict(make_images(len(requests)), requests)
    return [
        each.scores.tobytes() + each.indices.tobytes() + (b"" if each.map is None else each.map.values.tobytes())
        for each in outputs
    ]


def test_a_later_start_answers_the_same_bit_for_bit(kept: tuple[Path, Predictor], checkpoint_folder: Path) -> None:
    later = later_start(checkpoint_folder, kept[0])
    assert later is not None
    later.warm_up()
    assert answers(later, REQUESTS) == answers(kept[1], REQUESTS)
    for name in ("device", "dtype", "backend", "backend_reason", "parameters", "max_batch", "streams", "compiled"):
        assert getattr(later, name) == getattr(kept[1], name), name
    for name in store.KeptCheckpoint.model_fields:
        assert getattr(later.checkpoint, name) == getattr(kept[1].checkpoint, name), name


@pytest.mark.parametrize("fails", [False, True])
def test_a_later_start_answers_before_the_graphs_of_larger_batches_are_compiled(
    fails: bool,
    kept: tuple[Path, Predictor],
    checkpoint_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    wanted = answers(kept[1], REQUESTS)
    released, make = threading.Event(), Requests.__init__

    def compile_later(self: Requests, *given: Any, size: int | None = None, **options: Any) -> None:
        if size != 1:
            assert released.wait(60)
            if fails:
                raise RuntimeError("no memory")
        make(self, *given, size=size, **options)

    monkeypatch.setattr(Requests, "__init__", compile_later)
    later = later_start(checkpoint_folder, kept[0])
    assert later is not None
    later.warm_up()
    network = later._backend._network  # type: ignore[attr-defined]
    assert network._sizes == (1,)
    [alone, *_] = answers(later, REQUESTS[:1])
    assert alone == answers(kept[1], REQUESTS[:1])[0]
    close = later.predict(make_images(2), REQUESTS)
    released.set()
    wait_for_keeping()
    assert network._sizes == ((1,) if fails else (1, 2, 4, 8))
    lines = [record.message for record in caplog.records if "in pieces of (1,) images" in record.message]
    assert [line.endswith("no memory") for line in lines] == [True] * fails
    if not fails:
        assert answers(later, REQUESTS) == wanted
    for ours, theirs in zip(close, kept[1].predict(make_images(2), REQUESTS), strict=True):
        np.testing.assert_allclose(ours.scores, theirs.scores, rtol=1e-4)


def test_relevance_is_kept_once_it_was_made(checkpoint_folder: Path, tmp_path: Path) -> None:
    wanted = [RequestedOutputs(1, MapRequest("relevance"))] * 2
    first = first_start(checkpoint_folder, tmp_path / "graphs")
    first.predict(make_images(2), wanted)  # torch computes it, and its graph is made
    wait_for_keeping()
    expected = answers(first, wanted)
    assert len(list((tmp_path / "graphs").iterdir())) == 2
    later = kept_predictor(Entry(tmp_path / "graphs", {}), lambda: pytest.fail("torch is not needed"))
    assert later is not None
    assert later.defers(wanted[0])
    assert answers(later, wanted) == expected
    assert not later.defers(wanted[0])


def test_what_only_torch_computes_is_computed_by_torch(kept: tuple[Path, Predictor], checkpoint_folder: Path) -> None:
    requests = [RequestedOutputs(1, MapRequest("gae")), RequestedOutputs(2, MapRequest.row(0, head=1))]
    later = later_start(checkpoint_folder, kept[0])
    assert later is not None
    assert [later.defers(each) for each in requests] == [False, True], "the first has a thread of its own anyway"
    assert answers(later, requests) == answers(kept[1], requests)
    assert not later.defers(requests[1])


def test_torch_does_not_compute_with_other_weights_than_the_graph(
    copied: Path, checkpoint_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = later_start(checkpoint_folder, copied.parent)
    assert later is not None
    monkeypatch.setattr("model.runtime.kept.changed_file", lambda _, **__: "model.safetensors")
    with pytest.raises(CheckpointChanged, match=r"model\.safetensors changed since the start"):
        answers(later, [RequestedOutputs(1, MapRequest("gae"))])
    assert answers(later, REQUESTS[:1]), "what the graph gives goes on"


def test_a_graph_that_was_kept_of_other_weights_since_is_not_taken(checkpoint_folder: Path, tmp_path: Path) -> None:
    own, graphs = tmp_path / "own", tmp_path / "graphs"
    subprocess.run(["cp", "-r", checkpoint_folder, own], check=True)
    expected = answers(first_start(own, graphs), REQUESTS)
    service = later_start(own, graphs)
    assert service is not None
    flipped(own / "model.safetensors")
    relevance = [RequestedOutputs(1, MapRequest("relevance"))]
    answers(first_start(own, graphs), relevance)
    wait_for_keeping()
    assert len(list(graphs.iterdir())) == 2, "of the other weights"
    with pytest.raises(CheckpointChanged):
        answers(service, relevance)
    assert answers(service, REQUESTS) == expected


def rewritten(place: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest, with a checksum that is right."""
    path = place / "manifest.json"
    body = json.loads(path.read_bytes().partition(b"\n")[2])
    change(body)
    data = json.dumps(body).encode()
    path.write_bytes(sha256(data).hexdigest().encode() + b"\n" + data)


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def removed(path: Path) -> Path:
    path.unlink()
    return path


def flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("wrong", [1, 2])
def test_a_later_start_compares_its_graphs_with_what_torch_gave(
    wrong: int, kept: tuple[Path, Predictor], checkpoint_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, run_all = [wrong], Requests.run_all

    def spoilt(self: Requests, images: np.ndarray) -> list[list[np.ndarray]]:
        left[0] -= 1
        return [[each + (left[0] >= 0) for each in outputs] for outputs in run_all(self, images)]

    monkeypatch.setattr(Requests, "run_all", spoilt)
    later = later_start(checkpoint_folder, kept[0])
    if wrong == 2:
        assert later is None, "it is made again"
    else:
        assert later is not None
        assert answers(later, REQUESTS) == answers(kept[1], REQUESTS)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "weights cut short": lambda place: truncated(place / "graph.bin"),
    "a bit of the weights": lambda place: flipped(place / "graph.bin"),
    "a file less": lambda place: (place / "reference.safetensors").unlink(),
    "a bit of torch's outputs": lambda place: flipped(place / "reference.safetensors"),
    "a bit of the graph": lambda place: flipped(place / "graph.xml"),
    "a bit of the manifest": lambda place: flipped(place / "manifest.json"),
    "an empty manifest": lambda place: (place / "manifest.json").write_bytes(b""),
    "no JSON": lambda place: (place / "manifest.json").write_bytes(sha256(b"{[").hexdigest().encode() + b"\n{["),
    "deep JSON": lambda place: rewritten(place, lambda body: body.update(key=json.loads("[" * 500 + "]" * 500))),
    "an unknown field": lambda place: rewritten(place, lambda body: body.update(extra=1)),
    "another type": lambda place: rewritten(place, lambda body: body.update(threads="1")),
    "another output": lambda place: rewritten(place, lambda body: body.update(outputs=["logits", "password"])),
    "another key": lambda place: rewritten(place, lambda body: body.update(key="{}")),
    "a path as the graph": lambda place: rewritten(place, lambda body: body["graph"].update({"../x": "00"})),
    "another input size": lambda place: rewritten(
        place, lambda body: body["checkpoint"]["config"].update(image_size=[64, 64])
    ),
    "a folder for the manifest": lambda place: removed(place / "manifest.json").mkdir(),
    "a pipe for the weights": lambda place: os.mkfifo(removed(place / "graph.bin")),
    "written by anybody": lambda place: place.chmod(0o777),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_an_entry_that_is_not_sound_is_told_in_one_line_and_made_again(
    damage: Callable[[Path], object], copied: Path, checkpoint_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    damage(copied)
    assert later_start(checkpoint_folder, copied.parent) is None
    [record] = [each for each in caplog.records if each.name == store.__name__]
    assert "is made again" in record.getMessage()
    assert "\n" not in record.getMessage()


def test_what_belongs_to_another_user_is_not_run(
    copied: Path, checkpoint_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lstat = Path.lstat

    def of_another(self: Path) -> object:
        status = lstat(self)
        return os.stat_result([*status[:4], os.geteuid() + 1, *status[5:]]) if self == copied else status

    monkeypatch.setattr(Path, "lstat", of_another)
    assert later_start(checkpoint_folder, copied.parent) is None
    assert f"it belongs to uid {os.geteuid() + 1}" in caplog.text


CHANGES: dict[str, Callable[[Path], object]] = {
    "weights": lambda folder: flipped(folder / "model.safetensors"),
    "config": lambda folder: (folder / "config.json").write_text((folder / "config.json").read_text() + " "),
    "a file more": lambda folder: (folder / "adapter_config.json").write_text("{}"),
    "a file less": lambda folder: (folder / "model.safetensors").unlink(),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_checkpoint_that_changed_is_read_again(
    change: Callable[[Path], object], copied: Path, checkpoint_folder: Path, tmp_path: Path
) -> None:
    own = tmp_path / "own"
    subprocess.run(["cp", "-r", checkpoint_folder, own], check=True)

    def moved(body: dict[str, Any]) -> None:
        named = {path.replace(str(checkpoint_folder), str(own)): value for path, value in body["files"].items()}
        body["files"] = named

    rewritten(copied, moved)
    entry = Entry(copied.parent, {})
    assert entry.load() is not None
    change(own)
    assert entry.load() is None


def test_each_setting_version_and_fact_of_the_machine_has_a_graph_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def key(**settings: object) -> str:
        return Entry(tmp_path, settings).key(BatchRequest())

    keys = [key(), key(dtype="float32"), key(dtype="bfloat16"), key(image_size=(32, 32))]
    keys.append(Entry(tmp_path, {}).key(BatchRequest(relevance=True)))
    keys.append(Entry(tmp_path, {}).key(BatchRequest(all_tokens=True)))
    for name, value in (("OMP_NUM_THREADS", "7"), ("ONEDNN_MAX_CPU_ISA", "AVX2")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            keys.append(key())
    for place, found in (("_code", lambda: "other"), ("_versions", lambda: {"openvino": "1"}), ("_machine", dict)):
        with monkeypatch.context() as patch:
            patch.setattr(store, place, found)
            keys.append(key())
    assert len(set(keys)) == len(keys)
    assert key() == keys[0]


def put(folder: Path, used: int, size: int, *, limit: int = store.LIMIT) -> Path:
    """Put an entry of so many bytes into a folder, last used at a time, as `save` does; return its place."""
    folder.mkdir(exist_ok=True)
    entry = Entry(folder, {"number": used}, limit=limit)
    written = folder / f".{used}"
    written.mkdir()
    (written / "graph.bin").write_bytes(b"\0" * size)
    place = folder / entry.key(BatchRequest())
    if entry._make_room(size):
        entry._put(written, place)
        os.utime(place, (used, used))
    return place


def test_what_was_not_used_for_longest_gives_way(tmp_path: Path) -> None:
    places = [put(tmp_path / "graphs", used, 400, limit=1000) for used in (3, 1, 2)]
    assert [place.exists() for place in places] == [True, False, True]
    os.utime(places[0], (1, 1))
    places.append(put(tmp_path / "graphs", 4, 400, limit=1000))
    assert [place.exists() for place in places] == [False, False, True, True]
    assert not put(tmp_path / "graphs", 5, 1001, limit=1000).exists(), "it would have no room alone"


def test_writers_at_once_leave_a_whole_entry_and_no_other_files(tmp_path: Path) -> None:
    entry, folder = Entry(tmp_path, {}), tmp_path / entry_name()

    def write(number: int) -> None:
        for turn in range(20):
            written = tmp_path / f".{number}-{turn}"
            written.mkdir()
            (written / "graph.bin").write_bytes(bytes([number]) * 1000)
            entry._put(written, folder)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [each.name for each in tmp_path.iterdir()] == [folder.name]
    assert len(set((folder / "graph.bin").read_bytes())) == 1


def entry_name() -> str:
    return Entry(Path(), {}).key(BatchRequest())


def test_what_a_process_left_half_written_is_removed_in_time(tmp_path: Path) -> None:
    for name, age in ((".old", 4000), (".new", 10)):
        (tmp_path / name).mkdir()
        then = time.time() - age
        os.utime(tmp_path / name, (then, then))
    (tmp_path / ".link").symlink_to(tmp_path / "nowhere")
    (tmp_path / ".file").write_text("")
    os.utime(tmp_path / ".link", (0, 0), follow_symlinks=False)
    os.utime(tmp_path / ".file", (0, 0))
    Entry(tmp_path, {})._remove_abandoned()
    assert [each.name for each in tmp_path.iterdir()] == [".new"]


def test_a_full_disk_is_named(
    checkpoint_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object, **__: object) -> None:
        raise RuntimeError("basic_ios::clear: iostream error")

    monkeypatch.setattr(openvino, "save_model", full)
    first_start(checkpoint_folder, tmp_path / "graphs")
    assert re.search(rf"{tmp_path / 'graphs'} has \d+ MiB left: basic_ios::clear: iostream error", caplog.text)


def test_a_folder_that_cannot_be_written_costs_one_line(
    checkpoint_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "graphs").write_text("a file")
    first = first_start(checkpoint_folder, tmp_path / "graphs")
    assert first.backend.startswith("openvino")
    [record] = [each for each in caplog.records if each.name == store.__name__]
    assert "the graph is not kept, and is made again at each start" in record.getMessage()


def test_what_a_later_start_would_not_read_is_not_kept(
    checkpoint_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(store, "_MAX_MANIFEST", 100)
    first_start(checkpoint_folder, tmp_path / "graphs")
    assert "manifest.json would have" in caplog.text
    assert list((tmp_path / "graphs").iterdir()) == []


def test_a_checkpoint_that_changes_while_it_is_read_is_not_kept(
    checkpoint_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with recording() as files:
        loaded = load_checkpoint(str(checkpoint_folder))
    changed = {path: (0, 0, 0) if path.name == "model.safetensors" else each for path, each in files.items()}
    keep = Keep(Entry(tmp_path / "graphs", {}), changed)
    Predictor(loaded, device="cpu", dtype="float32", threads=1, keep=keep).warm_up()
    wait_for_keeping()
    assert "model.safetensors changed since it was read" in caplog.text
    assert list((tmp_path / "graphs").iterdir()) == []


def test_a_commit_of_the_hub_has_to_be_named(tmp_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    files = [Path(f"/hub/models--owner--name/snapshots/{commit}/config.json")]
    assert Entry(tmp_path, {"checkpoint": "owner/name"}).unpinned(files) == commit
    assert Entry(tmp_path, {"checkpoint": f"owner/name@{commit}"}).unpinned(files) is None


def test_an_entry_that_may_only_be_read_is_used(
    copied: Path, checkpoint_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "utime", refuse)
    assert later_start(checkpoint_folder, copied.parent) is not None


def test_a_graph_of_other_outputs_in_the_place_of_another_is_made_again(
    copied: Path, caplog: pytest.LogCaptureFixture
) -> None:
    entry = Entry(copied.parent, {})
    copied.rename(copied.with_name(entry.key(BatchRequest(relevance=True))))
    assert entry.load(BatchRequest(relevance=True)) is None
    assert "manifest.json is of another graph" in caplog.text
