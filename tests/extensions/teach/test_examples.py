"""The store of examples: additions, limits, permissions, and killed processes."""

import asyncio
import hashlib
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import tracemalloc
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from model.extensions.taught.known_examples import first_equal_indices
from service.errors import Forbidden, InvalidParameter, NotFound, SettingsError
from service.extensions.teach import examples as module
from service.extensions.teach.errors import HeadFull, HeadsUnavailable, HeadWithoutBackbone
from service.extensions.teach.examples import Examples
from service.extensions.teach.heads import TaughtHeads
from service.setting_values import ApiKey
from tests.service.fakes import FixedModels

BACKBONE = ("0123456789abcdef", "deit")


_DRAWN = np.random.default_rng(0)


def rows(count: int, width: int = 4) -> NDArray[np.float32]:
    """Return random features, different in each call."""
    return _DRAWN.normal(size=(count, width)).astype(np.float32)


@pytest.fixture
def store(tmp_path: Path) -> Examples:
    return Examples(tmp_path / "taught")


def add(store: Examples, label: str = "cat", count: int = 1, head: str = "pets") -> dict[str, int]:
    return store.add(head, label, rows(count), "alice", BACKBONE)[0]


def test_examples_are_numbered_in_order(store: Examples) -> None:
    cats = rows(2)
    dog = rows(1)
    assert store.add("pets", "cat", cats, "alice", BACKBONE) == ({"cat": 2}, [1, 2])
    assert store.add("pets", "a dog", dog, "alice", BACKBONE) == ({"cat": 2, "a dog": 1}, [3])
    again = Examples(store.database.path.parent)
    head = again.head("pets")
    assert [(each.number, each.label, each.who) for each in again.listed(head)] == [
        (1, "cat", "alice"),
        (2, "cat", "alice"),
        (3, "a dog", "alice"),
    ]
    numbers, labels, features = again.training_set(head)
    assert (numbers, labels) == ([1, 2, 3], ["cat", "cat", "a dog"])
    assert np.array_equal(features, np.concatenate([cats, dog]))


def test_a_repeated_picture_is_one_example(store: Examples) -> None:
    one, two, three = rows(3)
    store.add("pets", "cat", np.stack([one, two]), "alice", BACKBONE)
    before = store.head("pets")
    rounded = one * np.float32(1 + 1e-5)  # a batch of another size has such rounding
    assert store.add("pets", "cat", np.stack([two, rounded]), "alice", BACKBONE) == (
        {"cat": 2},
        [2, 1],
    )
    assert store.head("pets") == before, "nothing is fitted again"
    assert store.add("pets", "cat", np.stack([three, two, three]), "alice", BACKBONE) == (
        {"cat": 3},
        [3, 2, 3],
    )
    assert store.add("pets", "dog", one[np.newaxis], "alice", BACKBONE) == (
        {"cat": 3, "dog": 1},
        [4],
    )


def test_a_number_is_never_given_again(store: Examples) -> None:
    add(store, count=2)
    head = store.head("pets")
    store.remove(head, 2)
    add(store, "dog")
    assert [each.number for each in store.listed(head)] == [1, 3]
    for number in (2, 10**30):
        with pytest.raises(NotFound, match="no such example"):
            store.remove(head, number)


def test_relabelling_merges_equal_examples(
    store: Examples, monkeypatch: pytest.MonkeyPatch
) -> None:
    features = rows(2)
    store.add("pets", "cat", features, "alice", BACKBONE)
    store.add(
        "pets", "dog", np.stack([features[0] * np.float32(1 + 1e-5), *rows(1)]), "alice", BACKBONE
    )
    before = store.head("pets")
    assert store.relabel(before, 1, "dog") == {"dog": 2, "cat": 1}
    assert [(each.number, each.label) for each in store.listed(before)] == [
        (1, "dog"),
        (2, "cat"),
        (4, "dog"),
    ]
    assert store.head("pets").revision == before.revision + 1
    for number in (3, 10**30):
        with pytest.raises(NotFound, match="no such example"):
            store.relabel(before, number, "dog")
    monkeypatch.setattr(module, "MAX_LABELS", 2)
    with pytest.raises(HeadFull, match="at most 2 labels"):
        store.relabel(before, 1, "cow")
    assert store.state(before)[0] == {"dog": 2, "cat": 1}


def test_labels_of_one_head_differ_by_name(store: Examples) -> None:
    add(store, "Straße 1", count=2)
    add(store, "dog", count=2)
    for label in ("DOG", "STRASSE 1", "Straße  1"):
        with pytest.raises(InvalidParameter, match=r"only by case or spaces from '(dog|Straße 1)'"):
            add(store, label)
        with pytest.raises(InvalidParameter, match=r"a label of pets: use '(dog|Straße 1)'"):
            store.relabel(store.head("pets"), 1, label)
    assert store.state(store.head("pets"))[0] == {"Straße 1": 2, "dog": 2}
    add(store, "DOG", head="others")


def test_a_head_with_both_cases_keeps_them(store: Examples) -> None:
    add(store, "dog", count=2)
    add(store, "cat", count=2)
    with store.database.writing() as db:  # an earlier version took both
        db.execute("UPDATE examples SET label = 'Dog' WHERE label = 'cat'")
    assert add(store, "Dog") == {"dog": 2, "Dog": 3}
    assert add(store, "dog") == {"dog": 3, "Dog": 3}
    assert store.relabel(store.head("pets"), 3, "dog") == {"dog": 4, "Dog": 2}


def test_comparison_takes_little_memory(store: Examples) -> None:
    add(store, "dog", 3000)
    add(store)
    tracemalloc.start()
    try:
        store.relabel(store.head("pets"), 3001, "dog")
        first_equal_indices(rows(3000))
        assert tracemalloc.get_traced_memory()[1] < 30e6, "and not that of 3000 by 3000 numbers"
    finally:
        tracemalloc.stop()


def test_a_replaced_file_is_seen(store: Examples) -> None:
    add(store)
    shutil.copy(store.database.path, store.database.path.with_name("backup"))
    before = store.database.version()
    assert store.database.version() == before
    store.database.path.with_name("backup").replace(store.database.path)
    restored = store.database.version()
    assert restored != before
    add(Examples(store.database.path.parent), "dog")
    assert store.database.version() not in (before, restored)


def test_a_fit_of_a_deleted_head_is_not_kept(store: Examples) -> None:
    add(store)
    before = store.head("pets")
    store.remove(before)
    with pytest.raises(NotFound):
        store.head("pets")
    with pytest.raises(NotFound):
        store.remove(before)
    add(store)
    store.keep(before, b"of the old one")
    assert store.state(store.head("pets"))[1] is None
    assert len(store.listed(store.head("pets"))) == 1


def test_only_a_heads_key_adds_examples(store: Examples) -> None:
    add(store)
    head = store.head("pets")
    with pytest.raises(Forbidden, match=r"^pets: another key has begun"):
        store.add("pets", "dog", rows(1), "bob", BACKBONE)
    assert store.add("pets", "dog", rows(1), "bob", BACKBONE, head.id)[1] == [2], (
        "whoever was allowed to"
    )
    store.remove(store.head("pets"))
    with pytest.raises(NotFound, match=r"^pets: .* deleted"):
        store.add("pets", "cat", rows(1), "alice", BACKBONE, head.id)
    assert store.heads() == {}


def test_an_older_fit_replaces_no_newer_one(store: Examples) -> None:
    add(store)
    old = store.head("pets")
    add(store)
    new = store.head("pets")
    store.keep(new, b"new")
    store.keep(old, b"old")
    assert store.state(new)[1] == b"new"


def test_another_backbone_is_refused(store: Examples) -> None:
    add(store)
    with pytest.raises(
        HeadWithoutBackbone, match=r"^pets: its examples are of another backbone than that of vit$"
    ):
        store.add("pets", "cat", rows(1), "alice", ("fedcba9876543210", "vit"))


@pytest.mark.parametrize(
    ("bound", "value", "message"),
    [
        ("MAX_LABELS", 2, "at most 2 labels"),
        ("MAX_EXAMPLES", 3, "3 examples"),
        ("MAX_BYTES", 60, "60 bytes"),
    ],
)
def test_requests_over_a_bound_add_nothing(
    store: Examples, monkeypatch: pytest.MonkeyPatch, bound: str, value: int, message: str
) -> None:
    monkeypatch.setattr(module, bound, value)
    add(store, "cat", 2)
    add(store, "dog", 1)
    with pytest.raises(HeadFull, match=message):
        add(store, "cow", 2)
    assert store.state(store.head("pets"))[0] == {"cat": 2, "dog": 1}
    store.remove(store.head("pets"), 1)
    if bound != "MAX_LABELS":
        assert add(store, "dog")["dog"] == 2


def test_there_are_only_so_many_heads(store: Examples, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_HEADS", 2)
    add(store, head="one")
    add(store, head="two")
    with pytest.raises(HeadFull, match="2 heads already"):
        add(store, head="three")
    assert add(store, head="two") == {"cat": 2}
    assert set(store.heads()) == {"one", "two"}


def begin(store: Examples, creator: str, count: int) -> int:
    """Create heads until one is refused; return the number of this creator's heads."""
    for number in range(count):
        try:
            store.add(f"{creator}{number}", "cat", rows(1), creator, BACKBONE, creator=creator)
        except HeadFull as error:
            assert "and the rest is for others: delete one" in str(error)
            return number
    return count


def test_one_creator_leaves_heads_to_others(store: Examples) -> None:
    assert begin(store, "alice", 64) == 32
    assert begin(store, "bob", 64) == 16
    store.remove(store.head("alice0"))
    assert store.add("alice0", "cat", rows(1), "alice", BACKBONE, creator="carol") == (
        {"cat": 1},
        [1],
    )
    assert begin(store, "", 16) == 16, "the operator has the rest"


def test_shown_owners_reveal_no_key(store: Examples, tmp_path: Path) -> None:
    digest = f"key-{hashlib.sha256(b'hunter2').hexdigest()[:16]}"
    with (
        closing(sqlite3.connect(store.database.path)) as db,
        db,
    ):  # the owner's format of earlier versions
        db.execute("DELETE FROM secrets")
        db.execute(
            "INSERT INTO heads (name, backbone, model, owner, creator) "
            "VALUES ('pets', 'b', 'm', ?1, ?1)",
            [digest],
        )
        db.execute("INSERT INTO examples VALUES (1, 1, 'cat', 0, ?, x'00000000')", [digest])
    again = Examples(store.database.path.parent)
    owner = again.database.owner_of(ApiKey("key1", b"hunter2").owner)
    head = again.head("pets")
    assert (head.owner, [each.who for each in again.listed(head)]) == (owner, [owner])
    assert digest[4:] not in owner
    assert Examples(store.database.path.parent).database.owner_of(digest) == owner, (
        "workers and restarts share the secret"
    )
    assert Examples(tmp_path / "other").database.owner_of(digest) != owner
    assert again.database.owner_of("alice") == "alice"
    assert again.database.owner_of("") == ""
    assert Examples(tmp_path / "new").database.path.stat().st_mode & 0o777 == 0o600


def test_a_file_of_the_last_version_is_used(tmp_path: Path) -> None:
    store = Examples(tmp_path)
    add(store)
    with sqlite3.connect(store.database.path) as db:
        db.execute("ALTER TABLE heads DROP COLUMN creator")
        db.execute("DROP INDEX examples_by_label")
        db.execute("DROP TABLE pictures")
    again = Examples(tmp_path)
    assert add(again) == {"cat": 2}
    assert begin(again, "alice", 64) == 31, "her head of before counts"


def test_thumbnails_go_with_their_examples(
    store: Examples, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_BYTES", 2 * 16 + 2000)
    picture = module.KeptPicture("cat.jpg", bytes(1000))
    for _ in range(2):
        store.add("pets", "cat", rows(1), "", BACKBONE, pictures=[picture])
    with pytest.raises(HeadFull):
        store.add("pets", "cat", rows(1), "", BACKBONE, pictures=[picture])
    head = store.head("pets")
    assert [each.file_name for each in store.listed(head)] == ["cat.jpg"] * 2
    store.remove(head, 1)
    store.add("pets", "dog", rows(1), "", BACKBONE, pictures=[picture])
    store.remove(head)
    with sqlite3.connect(store.database.path) as db:
        assert db.execute("SELECT count(*) FROM pictures").fetchone() == (0,)


def test_two_who_add_at_once_lose_nothing(store: Examples) -> None:
    def several(label: str) -> None:
        for _ in range(15):
            store.add("pets", label, rows(2), "", BACKBONE)

    threads = [threading.Thread(target=several, args=(label,)) for label in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(store.state(store.head("pets"))[0].values()) == 90
    assert [each.number for each in store.listed(store.head("pets"))] == list(range(1, 91))


_WRITER = """
import sys
import numpy as np
from pathlib import Path
from service.extensions.teach.examples import Examples
store = Examples(Path(sys.argv[1]))
for number in range(10_000):
    rows = np.random.default_rng().normal(size=(7, 64)).astype(np.float32)
    counts, _ = store.add("pets", "cat", rows, "", ("backbone", "model"))
    print(counts["cat"], flush=True)
"""


def test_a_kill_leaves_the_last_whole_state(tmp_path: Path) -> None:
    said = 0
    for kill_after in (3, 8, 15):
        with subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(tmp_path)], stdout=subprocess.PIPE
        ) as writer:
            assert writer.stdout is not None
            for _ in range(kill_after):
                said = int(writer.stdout.readline())
            os.kill(writer.pid, signal.SIGKILL)
        store = Examples(tmp_path)
        numbers, _, _ = store.training_set(store.head("pets"))
        assert len(numbers) % 7 == 0, "a request's pictures are kept together"
        assert len(numbers) >= said, "what was answered is kept"
        assert numbers == list(range(1, len(numbers) + 1))
        with sqlite3.connect(store.database.path) as db:
            assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_full_disk_loses_nothing(store: Examples, monkeypatch: pytest.MonkeyPatch) -> None:
    add(store, count=2)
    store.keep(store.head("pets"), b"fitted")
    connect = store.database.connect

    def with_a_full_disk() -> sqlite3.Connection:
        db = connect()
        db.execute("PRAGMA max_page_count = 1")  # SQLite rounds this up to the size of the file
        return db

    with monkeypatch.context() as context:
        context.setattr(store.database, "connect", with_a_full_disk)
        with pytest.raises(HeadsUnavailable, match="database or disk is full"):
            add(store, "dog", 1000)
        assert store.state(store.head("pets")) == ({"cat": 2}, b"fitted")
    assert add(store, "dog") == {"cat": 2, "dog": 1}


def test_a_lost_or_damaged_folder_is_told(store: Examples) -> None:
    add(store)
    content = store.database.path.read_bytes()
    store.database.path.write_bytes(content[:100] + b"damaged" * 1000)
    with pytest.raises(HeadsUnavailable, match=r"^taught heads cannot be read or written: "):
        add(store)
    shutil.rmtree(store.database.path.parent)
    for call in (
        store.heads,
        lambda: add(store),
        lambda: asyncio.run(TaughtHeads(store, store.database.path, FixedModels({})).look()),
    ):
        with pytest.raises(HeadsUnavailable, match=r"^taught heads cannot be read or written: "):
            call()


def test_an_unusable_folder_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match=r"^VIT_TEACH: .*cannot be used"):
        Examples(tmp_path / "file")
    (tmp_path / "heads.sqlite3").write_bytes(b"no database " * 1000)
    with pytest.raises(SettingsError, match=r"^VIT_TEACH: .*heads.sqlite3: cannot be used"):
        Examples(tmp_path)
