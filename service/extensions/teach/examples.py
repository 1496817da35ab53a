"""The examples of taught heads, and the heads fitted to them: one SQLite file, which several
processes may use at once.

An example is what a backbone gives of a picture, its label, the time, and who sent it; never the
picture. Whatever process ends at whatever moment, the file holds what was committed before, and
nothing of what was not. Each change of a head's examples raises its revision, so that everyone sees
which fit is of which examples.

Methods block for some milliseconds: call them from a thread. Each raises `HeadsUnavailable` where
the file cannot be used.
"""

import base64
import hmac
import os
import re
import secrets
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.features import equal, first_equal
from model.taught_heads import Features
from service.errors import (
    Forbidden,
    HeadFull,
    HeadsUnavailable,
    HeadWithoutBackbone,
    NotFound,
    SettingsError,
)
from vitserve.head_documents import ExampleDocument

MAX_HEADS: Final = 64
MAX_LABELS: Final = 1000
MAX_EXAMPLES: Final = 20_000
# Of the features of a head; the bounds above but the first are of one head, too.
MAX_BYTES: Final = 64 * 2**20

_REMEDY: Final = "delete one (with keys set, VIT_ADMIN_KEY does), or teach one that is there"

PAGE: Final = 1000
"""Examples that a page of a list has at most."""

_FILE: Final = "heads.sqlite3"
# How long a change waits for another one to end; each takes milliseconds.
_LOCKED_SECONDS: Final = 10.0

# The largest integer that SQLite takes.
_NO_NUMBER: Final = 2**63 - 1

# Files of a version before some column or table are given it when they are opened; that version
# goes on to use them.
_VERSION: Final = 1
_TABLES: Final = f"""
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS heads (
    id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL UNIQUE,
    backbone TEXT NOT NULL, model TEXT NOT NULL, owner TEXT NOT NULL,
    numbers INTEGER NOT NULL DEFAULT 0, revision INTEGER NOT NULL DEFAULT 0,
    fitted_revision INTEGER NOT NULL DEFAULT 0, fitted BLOB, reason TEXT NOT NULL DEFAULT '');
CREATE TABLE IF NOT EXISTS examples (
    head INTEGER NOT NULL REFERENCES heads ON DELETE CASCADE, number INTEGER NOT NULL, label TEXT NOT NULL,
    time REAL NOT NULL, who TEXT NOT NULL, features BLOB NOT NULL, UNIQUE (head, number));
CREATE TABLE IF NOT EXISTS pictures (
    head INTEGER NOT NULL, number INTEGER NOT NULL, file_name TEXT NOT NULL, thumbnail BLOB NOT NULL,
    PRIMARY KEY (head, number), FOREIGN KEY (head, number) REFERENCES examples (head, number) ON DELETE CASCADE);
CREATE INDEX IF NOT EXISTS examples_by_label ON examples (head, label, number);
CREATE TABLE IF NOT EXISTS secrets (name TEXT PRIMARY KEY, value BLOB NOT NULL);
PRAGMA user_version = {_VERSION};
COMMIT;
"""
_LISTED: Final = """
SELECT number, label, time, who, file_name FROM examples LEFT JOIN pictures USING (head, number)
"""
_CREATOR: Final = """
BEGIN IMMEDIATE;
ALTER TABLE heads ADD COLUMN creator TEXT NOT NULL DEFAULT '';
UPDATE heads SET creator = owner;
COMMIT;
"""


_DIGEST: Final = re.compile(r"key-[0-9a-f]{16}")
"""The owner of a key without a name: a digest from which a weak key can be guessed."""


@contextmanager
def kept_on_disk() -> Iterator[None]:
    """Raise `HeadsUnavailable` for what is raised inside where a file cannot be used."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        raise HeadsUnavailable(f"taught heads cannot be read or written: {error}") from None


class KeptPicture(NamedTuple):
    """What is kept of an example's picture: the name of its file, which may be empty, and a small
    JPEG.
    """

    file_name: str
    thumbnail: bytes


class HeadRow(NamedTuple):
    """A head.

    Attributes:
        id: no other head ever has it, also of the same name.
        backbone: names what its features are of.
        model: with which it was begun.
        owner: the name of the key that began it, or a digest, see `owner_of`; empty without keys,
        and of the admin key.
        revision: changes with its examples.
        fitted_revision: of the examples that it was last fitted to, or could not be.
        reason: why its examples give no head; empty if they do.
    """

    id: int
    name: str
    backbone: str
    model: str
    owner: str
    revision: int
    fitted_revision: int
    reason: str


class Examples:
    """The examples of all heads in a folder, which is made if it is absent.

    Raises:
        SettingsError: the folder cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / _FILE
        try:
            folder.mkdir(parents=True, exist_ok=True)
            os.close(
                os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            )  # it holds a secret
            self._open()
            [version] = self._watching.execute("PRAGMA user_version").fetchone()
            if version not in (0, _VERSION):
                raise OSError("it is of another version of vitserve")
            self._prepare()
        except (OSError, sqlite3.Error) as error:
            raise SettingsError(f"VIT_TEACH: {self.path}: cannot be used: {error}") from None

    @kept_on_disk()
    def version(self) -> tuple[int, int]:
        """Return numbers that are others as soon as anybody has changed anything, or put another
        file in its place.
        """
        file = self.path.stat().st_ino  # no other file has it while this one is open
        if file != self._file:
            self._open()
            self._prepare()
        [version] = self._watching.execute("PRAGMA data_version").fetchone()
        return file, int(version)

    def owner_of(self, key_owner: str) -> str:
        """Return what is kept and shown of a key: its name, or without one a digest that no key can
        be guessed from.

        Args:
            key_owner: `ApiKey.owner` of the key; empty without keys.
        """
        if _DIGEST.fullmatch(key_owner) is None:
            return key_owner
        return f"key-{hmac.digest(self._secret, key_owner.encode(), 'sha256').hex()[:32]}"

    def add(
        self,
        name: str,
        label: str,
        features: NDArray[np.float32],
        who: str,
        backbone: tuple[str, str],
        known: int | None = None,
        creator: str = "",
        pictures: Sequence[KeptPicture] = (),
    ) -> tuple[dict[str, int], list[int]]:
        """Add an example for each row of features [N, D], all or none; return the labels' counts,
        and their numbers.

        What equals an example of the label, but for rounding, is that example.

        Args:
            name: of the head, which is made if it is absent.
            who: the name of the caller's key, or a digest, see `owner_of`.
            backbone: what the features are of, and the name of its model.
            known: the id of the head as the caller was allowed to teach it; None: there was none.
            creator: who begins the head, to whose share it counts: a key or an address; empty for
            the operator.
            pictures: what is kept of the picture of each row; none: nothing.

        Raises:
            NotFound: that head is deleted.
            Forbidden: another key has begun one meanwhile.
            HeadWithoutBackbone: the head's other examples are of another backbone.
            HeadFull: there are too many heads, or of this creator, or labels or examples of this
            one.
        """
        with self._transaction() as db:
            columns = "INSERT OR IGNORE INTO heads (name, backbone, model, owner, creator) VALUES (?, ?, ?, ?, ?)"
            if db.execute(columns, [name, *backbone, who, creator]).rowcount:
                _require_share(db, name, creator)
            query = "SELECT id, backbone, numbers, owner FROM heads WHERE name = ?"
            head, features_of, numbers, owner = db.execute(query, [name]).fetchone()
            if known not in (None, head):
                raise NotFound(f"{name}: this head was deleted while the pictures arrived")
            if known is None and owner != who:
                raise Forbidden(
                    f"{name}: another key has begun this head while the pictures arrived"
                )
            if features_of != backbone[0]:
                raise HeadWithoutBackbone(
                    f"{name}: its examples are of another backbone than that of {backbone[1]}"
                )
            query = (
                "SELECT number, features FROM examples WHERE head = ? AND label = ? ORDER BY number"
            )
            kept = db.execute(query, [head, label]).fetchall()
            given = [row.tobytes() for row in features.astype(Features.named(backbone[0]).dtype)]
            every = _stacked([*(row for _, row in kept), *given], backbone[0])
            numbered, rows = [number for number, _ in kept], list[tuple[object, ...]]()
            kept_pictures: list[tuple[object, ...]] = []
            for place, (row, first) in enumerate(
                zip(given, first_equal(every, len(kept)).tolist(), strict=True)
            ):
                if first == len(numbered):
                    if pictures:
                        kept_pictures.append((head, numbers + len(rows) + 1, *pictures[place]))
                    rows.append((head, numbers + len(rows) + 1, label, time.time(), who, row))
                numbered.append(numbered[first] if first < len(numbered) else rows[-1][1])
            db.executemany("INSERT INTO examples VALUES (?, ?, ?, ?, ?, ?)", rows)
            db.executemany("INSERT INTO pictures VALUES (?, ?, ?, ?)", kept_pictures)
            totals = "SELECT count(*), count(DISTINCT label), sum(length(features)) FROM examples WHERE head = ?"
            count, labels, size = db.execute(totals, [head]).fetchone()
            thumbnails = "SELECT coalesce(sum(length(thumbnail)), 0) FROM pictures WHERE head = ?"
            size += db.execute(thumbnails, [head]).fetchone()[0]
            if count > MAX_EXAMPLES or labels > MAX_LABELS or size > MAX_BYTES:
                limits = (
                    f"{MAX_LABELS} labels, {MAX_EXAMPLES} examples and {MAX_BYTES} bytes of them"
                )
                raise HeadFull(f"{name}: a head has at most {limits}")
            return _changed(db, head, len(rows)), numbered[len(kept) :]

    def remove(self, head: HeadRow, number: int | None = None) -> dict[str, int]:
        """Remove an example, or with None the whole head; return how many each label has. Raises
        `NotFound`.
        """
        with self._transaction() as db:
            query, of = "DELETE FROM heads WHERE id = ?", [head.id]
            if number is not None:
                query, of = (
                    "DELETE FROM examples WHERE head = ? AND number = ?",
                    [head.id, min(number, _NO_NUMBER)],
                )
            if not db.execute(query, of).rowcount:
                raise NotFound(
                    f"{head.name}: there is no such {'head' if number is None else 'example'}"
                )
            return _changed(db, head.id)

    def relabel(self, head: HeadRow, number: int, label: str) -> dict[str, int]:
        """Put an example under another label, which has it once then; return how many each label
        has.

        Raises:
            NotFound: there is no such example.
            HeadFull: the head has as many labels as it may.
        """
        with self._transaction() as db:
            moved = "UPDATE examples SET label = ? WHERE head = ? AND number = ?"
            if not db.execute(moved, [label, head.id, min(number, _NO_NUMBER)]).rowcount:
                raise NotFound(f"{head.name}: there is no such example")
            query = "SELECT number, features FROM examples WHERE head = ? AND label = ? ORDER BY number != ?"
            rows = db.execute(query, [head.id, label, number]).fetchall()
            exact = _stacked([row for _, row in rows], head.backbone).astype(np.float64)
            [are_copies] = equal(exact[:1], exact[1:])
            copies = [(head.id, rows[1 + place][0]) for place in np.flatnonzero(are_copies)]
            db.executemany("DELETE FROM examples WHERE head = ? AND number = ?", copies)
            counts = _changed(db, head.id)
            if len(counts) > MAX_LABELS:
                raise HeadFull(f"{head.name}: a head has at most {MAX_LABELS} labels")
            return counts

    def heads(self) -> dict[str, HeadRow]:
        """Return all heads by name."""
        with self._transaction("BEGIN") as db:
            rows = db.execute(f"SELECT {', '.join(HeadRow._fields)} FROM heads").fetchall()
        return {row.name: row for row in map(HeadRow._make, rows)}

    def head(self, name: str) -> HeadRow:
        """Return a head; raises `NotFound`."""
        found = self.heads().get(name)
        if found is None:
            raise NotFound(f"{name}: there is no such head")
        return found

    def listed(self, head: HeadRow, after: int = 0) -> list[ExampleDocument]:
        """Return a page of a head's examples: the first `PAGE` whose number is above `after`, in
        order.
        """
        query = f"{_LISTED} WHERE head = ? AND number > ? ORDER BY number LIMIT ?"
        with self._transaction("BEGIN") as db:
            return list(map(_document, db.execute(query, [head.id, min(after, _NO_NUMBER), PAGE])))

    def example(self, head: HeadRow, number: int) -> ExampleDocument:
        """Return an example of a head, with its thumbnail if one is kept; raises `NotFound`."""
        key = [head.id, min(number, _NO_NUMBER)]
        with self._transaction("BEGIN") as db:
            row = db.execute(f"{_LISTED} WHERE head = ? AND number = ?", key).fetchone()
            if row is None:
                raise NotFound(f"{head.name}: there is no such example")
            query = "SELECT thumbnail FROM pictures WHERE head = ? AND number = ?"
            kept = db.execute(query, key).fetchone()
        uri = (
            None if kept is None else f"data:image/jpeg;base64,{base64.b64encode(kept[0]).decode()}"
        )
        return _document(row).model_copy(update={"thumbnail": uri})

    def training_set(self, head: HeadRow) -> tuple[list[int], list[str], NDArray[np.float32]]:
        """Return the numbers, the labels and the features, float32 [N, D], of the examples of a
        head.
        """
        with self._transaction("BEGIN") as db:
            query = "SELECT number, label, features FROM examples WHERE head = ? ORDER BY number"
            rows = db.execute(query, [head.id]).fetchall()
        return (
            [row[0] for row in rows],
            [row[1] for row in rows],
            _stacked([row[2] for row in rows], head.backbone),
        )

    def keep(self, head: HeadRow, fitted: bytes | None, reason: str = "") -> None:
        """Keep what was fitted to the examples as of `head.revision`, unless the head is gone or
        has something newer.

        Those may give None, for a `reason`: nothing is kept of what was fitted to examples that are
        deleted.
        """
        with self._transaction() as db:
            db.execute(
                "UPDATE heads SET fitted = ?, fitted_revision = ?, reason = ? WHERE id = ? AND fitted_revision < ?",
                [fitted, head.revision, reason, head.id, head.revision],
            )

    def state(self, head: HeadRow) -> tuple[dict[str, int], bytes | None]:
        """Return how many examples each label has, and the file of the head, None before its first
        fit.
        """
        with self._transaction("BEGIN") as db:
            row = db.execute("SELECT fitted FROM heads WHERE id = ?", [head.id]).fetchone()
            return _counts(db, head.id), row and row[0]

    def _open(self) -> None:
        self._watching = self._connect()
        self._file = self.path.stat().st_ino

    def _prepare(self) -> None:
        """Create what a new file or one of an earlier version lacks, and read the secret of its
        owners.
        """
        self._watching.executescript(_TABLES)
        self._add_columns()
        with self._watching as db:
            db.execute("BEGIN IMMEDIATE")
            db.execute(
                "INSERT OR IGNORE INTO secrets VALUES ('owners', ?)", [secrets.token_bytes(32)]
            )
            [self._secret] = db.execute(
                "SELECT value FROM secrets WHERE name = 'owners'"
            ).fetchone()
            changed = [
                self._replace_digests(db, "heads", column) for column in ("owner", "creator")
            ]
            if any(changed):
                self._replace_digests(db, "examples", "who")

    def _replace_digests(self, db: sqlite3.Connection, table: str, column: str) -> bool:
        """Replace the digests of an earlier version by those of `owner_of`; return whether there
        were any.
        """
        owners = [row[0] for row in db.execute(f"SELECT DISTINCT {column} FROM {table}")]
        digests = [owner for owner in owners if _DIGEST.fullmatch(owner)]
        for digest in digests:
            db.execute(
                f"UPDATE {table} SET {column} = ? WHERE {column} = ?",
                [self.owner_of(digest), digest],
            )
        return bool(digests)

    def _add_columns(self) -> None:
        """Add the columns that a file of an earlier version lacks."""
        columns = [row[1] for row in self._watching.execute("PRAGMA table_info(heads)")]
        if "creator" in columns:
            return
        try:
            self._watching.executescript(_CREATOR)
        except sqlite3.OperationalError as error:
            if "duplicate column" not in str(error):  # another process has added it meanwhile
                raise
            self._watching.rollback()

    def _connect(self) -> sqlite3.Connection:
        db = sqlite3.connect(
            self.path, timeout=_LOCKED_SECONDS, isolation_level=None, check_same_thread=False
        )
        db.executescript("PRAGMA foreign_keys = ON; PRAGMA secure_delete = ON")
        return db

    @contextmanager
    def _transaction(self, begin: str = "BEGIN IMMEDIATE") -> Iterator[sqlite3.Connection]:
        """Give the file as it is, all of what is done there or nothing; by default nobody else
        changes it meanwhile.
        """
        with kept_on_disk(), closing(self._connect()) as db, db:  # an error undoes what was changed
            db.execute(begin)
            yield db


def _stacked(rows: Sequence[bytes], features: str) -> NDArray[np.float32]:
    """Return features as they are kept, float32 [N, D]."""
    kept = np.frombuffer(b"".join(rows), Features.named(features).dtype).reshape(
        max(1, len(rows)), -1
    )
    return kept.astype(np.float32)


def too_few(counts: Mapping[str, int]) -> str:
    """Return why numbers of examples by label give no head, or an empty text."""
    enough = sum(count >= 2 for count in counts.values()) >= 2
    return "" if enough else "two labels with two pictures each are needed at least"


def _require_share(db: sqlite3.Connection, name: str, creator: str) -> None:
    """Raise `HeadFull` if there are too many heads, or a creator leaves fewer to the others than it
    has.

    The head of this name is among them.
    """
    [count] = db.execute("SELECT count(*) FROM heads").fetchone()
    if count > MAX_HEADS:
        raise HeadFull(f"{name}: there are {MAX_HEADS} heads already: {_REMEDY}")
    [own] = db.execute("SELECT count(*) FROM heads WHERE creator = ?", [creator]).fetchone()
    if creator and own > max(1, MAX_HEADS - count):
        share = f"{own - 1} of {MAX_HEADS} heads were begun by this key or address, and the rest is for others"
        raise HeadFull(f"{name}: {share}: {_REMEDY}")


def _document(row: tuple[int, str, float, str, str | None]) -> ExampleDocument:
    """Return a row of `_LISTED` as it is answered."""
    number, label, seconds, who, file_name = row
    sent = datetime.fromtimestamp(seconds, UTC)
    return ExampleDocument(
        number=number, label=label, time=sent, who=who or None, file_name=file_name or None
    )


def _changed(db: sqlite3.Connection, head: int, added: int | None = None) -> dict[str, int]:
    """Note that examples of a head were added, or with None removed, and return how many each label
    has.
    """
    counts, changed = (
        _counts(db, head),
        "numbers = numbers + ?, revision = revision + ?, reason = ?",
    )
    new = [added or 0, added != 0, too_few(counts), head]
    db.execute(f"UPDATE heads SET {changed} WHERE id = ?", new)
    return counts


def _counts(db: sqlite3.Connection, head: int) -> dict[str, int]:
    query = (
        "SELECT label, count(*) FROM examples WHERE head = ? GROUP BY label ORDER BY min(number)"
    )
    return dict(db.execute(query, [head]).fetchall())
