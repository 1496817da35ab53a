"""The examples of taught heads, and the heads that were fitted to them.

An example is a picture's features, its label, the time, and its sender. The picture itself is not
kept. Every change of a head's examples raises the head's revision, so that every process knows
which examples a fit belongs to.

Methods block for some milliseconds: call them from a thread. Each raises `HeadsUnavailable` if the
file cannot be used.
"""

import base64
import sqlite3
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.extensions.taught.known_examples import equal_pairs, first_equal_indices
from model.extensions.taught.taught_heads import Features
from model.label_texts import folded
from service.errors import Forbidden, InvalidParameter, NotFound
from service.extensions.teach.database import HeadsDatabase
from service.extensions.teach.errors import HeadFull, HeadWithoutBackbone
from vitserve.head_documents import ExampleDocument

MAX_HEADS: Final = 64

# Limits of one head.
MAX_LABELS: Final = 1000
MAX_EXAMPLES: Final = 20_000
# Of features and thumbnails.
MAX_BYTES: Final = 64 * 2**20

# Why a head of few pictures is not fitted.
TOO_FEW: Final = "needs at least two labels with two pictures each"

_REMEDY: Final = "delete one (with keys set, VIT_ADMIN_KEY does), or teach one that is there"

PAGE: Final = 1000
"""Most examples in a page of a list."""

# The largest integer of SQLite. No example has this number.
_NO_NUMBER: Final = 2**63 - 1

_LISTED: Final = """
SELECT number, label, time, who, file_name FROM examples LEFT JOIN pictures USING (head, number)
"""


class KeptPicture(NamedTuple):
    """The name of a picture's file, which may be empty, and a small JPEG of the picture."""

    file_name: str
    thumbnail: bytes


class HeadRow(NamedTuple):
    """A head.

    Attributes:
        id: unique for all time, even if a later head has the same name.
        backbone: name of the features that its examples have.
        model: name of the model that it was begun with.
        owner: name of the key that began it, or a digest (see `HeadsDatabase.owner_of`); empty
            without keys, and for the admin key.
        revision: raised by every change of its examples.
        fitted_revision: revision of the last fit, even if that failed.
        reason: why the fit failed, or an empty text.
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
    """The examples of all heads in a folder, which is created if absent.

    Attributes:
        database: the file of the heads.

    Raises:
        SettingsError: the folder cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self.database = HeadsDatabase(folder)

    def add(
        self,
        name: str,
        label: str,
        features: NDArray[np.float32],
        who: str,
        backbone: tuple[str, str],
        permitted_id: int | None = None,
        creator: str = "",
        pictures: Sequence[KeptPicture] = (),
    ) -> tuple[dict[str, int], list[int]]:
        """Add an example for each row of features [N, D], all or none.

        A row that equals an example of the same label, except for rounding, is that example.

        Args:
            name: name of the head, which is created if absent.
            who: name of the caller's key, or a digest: see `HeadsDatabase.owner_of`.
            backbone: name of the features, and name of the model that gives them.
            permitted_id: id of the head that the caller may teach; None if it was absent when its
                permission was checked.
            creator: key or address that counts the head in its share; empty for the operator.
            pictures: a picture for each row, or none.

        Returns:
            The number of examples by label, and the number of each row's example.

        Raises:
            NotFound: the permitted head was deleted.
            Forbidden: another key has begun a head of this name meanwhile.
            HeadWithoutBackbone: the head's other examples have other features.
            InvalidParameter: the label differs only by case or spaces from one that the head has.
            HeadFull: a limit of heads, labels, examples or bytes is reached.
        """
        with self.database.writing() as db:
            insert = (
                "INSERT OR IGNORE INTO heads (name, backbone, model, owner, creator) "
                "VALUES (?, ?, ?, ?, ?)"
            )
            if db.execute(insert, [name, *backbone, who, creator]).rowcount:
                _require_share(db, name, creator)
            query = "SELECT id, backbone, numbers, owner FROM heads WHERE name = ?"
            head, features_of, numbers, owner = db.execute(query, [name]).fetchone()
            if permitted_id not in (None, head):
                raise NotFound(f"{name}: this head was deleted while the pictures arrived")
            if permitted_id is None and owner != who:
                raise Forbidden(
                    f"{name}: another key has begun this head while the pictures arrived"
                )
            if features_of != backbone[0]:
                raise HeadWithoutBackbone(
                    f"{name}: its examples are of another backbone than that of {backbone[1]}"
                )
            _require_one_spelling(db, name, head, label)
            query = (
                "SELECT number, features FROM examples WHERE head = ? AND label = ? ORDER BY number"
            )
            stored = db.execute(query, [head, label]).fetchall()
            rows = [row.tobytes() for row in features.astype(Features.named(features_of).dtype)]
            all_features = _stacked([*(row for _, row in stored), *rows], features_of)
            numbers_of_rows = [number for number, _ in stored]
            new_examples: list[tuple[object, ...]] = []
            new_pictures: list[tuple[object, ...]] = []
            for index, first in enumerate(first_equal_indices(all_features, len(stored)).tolist()):
                if first < len(numbers_of_rows):
                    numbers_of_rows.append(numbers_of_rows[first])
                    continue
                number = numbers + len(new_examples) + 1
                numbers_of_rows.append(number)
                new_examples.append((head, number, label, time.time(), who, rows[index]))
                if pictures:
                    new_pictures.append((head, number, *pictures[index]))
            db.executemany("INSERT INTO examples VALUES (?, ?, ?, ?, ?, ?)", new_examples)
            db.executemany("INSERT INTO pictures VALUES (?, ?, ?, ?)", new_pictures)
            _require_room(db, name, head)
            return _changed(db, head, len(new_examples)), numbers_of_rows[len(stored) :]

    def remove(self, head: HeadRow, number: int | None = None) -> dict[str, int]:
        """Remove an example, or the whole head if the number is None.

        Returns:
            The number of examples by label.

        Raises:
            NotFound: the example or the head is unknown.
        """
        with self.database.writing() as db:
            if number is None:
                removed = db.execute("DELETE FROM heads WHERE id = ?", [head.id]).rowcount
                kind = "head"
            else:
                query = "DELETE FROM examples WHERE head = ? AND number = ?"
                removed = db.execute(query, [head.id, min(number, _NO_NUMBER)]).rowcount
                kind = "example"
            if not removed:
                raise NotFound(f"{head.name}: there is no such {kind}")
            return _changed(db, head.id)

    def relabel(self, head: HeadRow, number: int, label: str) -> dict[str, int]:
        """Put an example under another label, and remove its copies there.

        Returns:
            The number of examples by label.

        Raises:
            NotFound: the example is unknown.
            HeadFull: the head has the most labels already.
            InvalidParameter: as `add`.
        """
        with self.database.writing() as db:
            _require_one_spelling(db, head.name, head.id, label)
            update = "UPDATE examples SET label = ? WHERE head = ? AND number = ?"
            if not db.execute(update, [label, head.id, min(number, _NO_NUMBER)]).rowcount:
                raise NotFound(f"{head.name}: there is no such example")
            query = (
                "SELECT number, features FROM examples WHERE head = ? AND label = ? "
                "ORDER BY number != ?"
            )
            rows = db.execute(query, [head.id, label, number]).fetchall()
            exact = _stacked([row for _, row in rows], head.backbone).astype(np.float64)
            [are_copies] = equal_pairs(exact[:1], exact[1:])
            copies = [(head.id, rows[1 + index][0]) for index in np.flatnonzero(are_copies)]
            db.executemany("DELETE FROM examples WHERE head = ? AND number = ?", copies)
            counts = _changed(db, head.id)
            if len(counts) > MAX_LABELS:
                raise HeadFull(f"{head.name}: a head has at most {MAX_LABELS} labels")
            return counts

    def heads(self) -> dict[str, HeadRow]:
        """Return all heads by name."""
        with self.database.reading() as db:
            rows = db.execute(f"SELECT {', '.join(HeadRow._fields)} FROM heads").fetchall()
        return {row.name: row for row in map(HeadRow._make, rows)}

    def head(self, name: str) -> HeadRow:
        """Return a head; raises `NotFound`."""
        head = self.heads().get(name)
        if head is None:
            raise NotFound(f"{name}: there is no such head")
        return head

    def listed(self, head: HeadRow, after: int = 0) -> list[ExampleDocument]:
        """Return the first `PAGE` examples of a head whose numbers are above `after`, in order."""
        query = f"{_LISTED} WHERE head = ? AND number > ? ORDER BY number LIMIT ?"
        with self.database.reading() as db:
            return list(map(_document, db.execute(query, [head.id, min(after, _NO_NUMBER), PAGE])))

    def example(self, head: HeadRow, number: int) -> ExampleDocument:
        """Return an example of a head, with its thumbnail if there is one; raises `NotFound`."""
        key = [head.id, min(number, _NO_NUMBER)]
        with self.database.reading() as db:
            row = db.execute(f"{_LISTED} WHERE head = ? AND number = ?", key).fetchone()
            if row is None:
                raise NotFound(f"{head.name}: there is no such example")
            query = "SELECT thumbnail FROM pictures WHERE head = ? AND number = ?"
            picture = db.execute(query, key).fetchone()
        if picture is None:
            return _document(row)
        uri = f"data:image/jpeg;base64,{base64.b64encode(picture[0]).decode()}"
        return _document(row).model_copy(update={"thumbnail": uri})

    def training_set(self, head: HeadRow) -> tuple[list[int], list[str], NDArray[np.float32]]:
        """Return the numbers, the labels and the features, float32 [N, D], of a head's examples."""
        with self.database.reading() as db:
            query = "SELECT number, label, features FROM examples WHERE head = ? ORDER BY number"
            rows = db.execute(query, [head.id]).fetchall()
        numbers = [row[0] for row in rows]
        labels = [row[1] for row in rows]
        return numbers, labels, _stacked([row[2] for row in rows], head.backbone)

    def keep(self, head: HeadRow, fitted: bytes | None, reason: str = "") -> None:
        """Store the fit to the examples of `head.revision`.

        No effect if the head is gone, or has a newer fit.

        Args:
            fitted: file of the head; None removes it, so that no fit to deleted examples remains.
            reason: why the fit failed.
        """
        update = (
            "UPDATE heads SET fitted = ?, fitted_revision = ?, reason = ? "
            "WHERE id = ? AND fitted_revision < ?"
        )
        with self.database.writing() as db:
            db.execute(update, [fitted, head.revision, reason, head.id, head.revision])

    def state(self, head: HeadRow) -> tuple[dict[str, int], bytes | None]:
        """Return the number of examples by label, and the file of the head; None before a fit."""
        with self.database.reading() as db:
            row = db.execute("SELECT fitted FROM heads WHERE id = ?", [head.id]).fetchone()
            return _counts(db, head.id), row and row[0]


def _stacked(rows: Sequence[bytes], features: str) -> NDArray[np.float32]:
    """Return stored features as float32 [N, D].

    Args:
        features: name of the features, which decides their dtype.
    """
    stored = np.frombuffer(b"".join(rows), Features.named(features).dtype)
    return stored.reshape(max(1, len(rows)), -1).astype(np.float32)


def too_few(counts: Mapping[str, int]) -> str:
    """Return why a head needs more examples than these numbers by label, or an empty text."""
    enough = sum(count >= 2 for count in counts.values()) >= 2
    return "" if enough else TOO_FEW


def _require_share(db: sqlite3.Connection, name: str, creator: str) -> None:
    """Raise `HeadFull` if there are too many heads, or too many of one creator.

    A creator may have as many heads as it leaves free. The head of this name counts.
    """
    [count] = db.execute("SELECT count(*) FROM heads").fetchone()
    if count > MAX_HEADS:
        raise HeadFull(f"{name}: there are {MAX_HEADS} heads already: {_REMEDY}")
    query = "SELECT count(*) FROM heads WHERE creator = ?"
    [of_creator] = db.execute(query, [creator]).fetchone()
    if creator and of_creator > max(1, MAX_HEADS - count):
        raise HeadFull(
            f"{name}: {of_creator - 1} of {MAX_HEADS} heads were begun by this key or address, "
            f"and the rest is for others: {_REMEDY}"
        )


def _require_one_spelling(db: sqlite3.Connection, name: str, head: int, label: str) -> None:
    """Raise `InvalidParameter` for a new label that differs only by case or spaces from another."""
    labels = [
        row[0] for row in db.execute("SELECT DISTINCT label FROM examples WHERE head = ?", [head])
    ]
    similar = [other for other in labels if folded(other) == folded(label)]
    if similar and label not in similar:
        raise InvalidParameter(
            f"label: {label!r} differs only by case or spaces from {similar[0]!r}, a label of "
            f"{name}: use {similar[0]!r}, or move its examples to a label of another name first"
        )


def _require_room(db: sqlite3.Connection, name: str, head: int) -> None:
    """Raise `HeadFull` if a head has more labels, examples or bytes than it may have."""
    query = (
        "SELECT count(*), count(DISTINCT label), sum(length(features)) FROM examples WHERE head = ?"
    )
    count, labels, size = db.execute(query, [head]).fetchone()
    query = "SELECT coalesce(sum(length(thumbnail)), 0) FROM pictures WHERE head = ?"
    [thumbnails] = db.execute(query, [head]).fetchone()
    if count > MAX_EXAMPLES or labels > MAX_LABELS or size + thumbnails > MAX_BYTES:
        raise HeadFull(
            f"{name}: a head has at most {MAX_LABELS} labels, {MAX_EXAMPLES} examples and "
            f"{MAX_BYTES} bytes of them"
        )


def _document(row: tuple[int, str, float, str, str | None]) -> ExampleDocument:
    """Return the document of a row of `_LISTED`."""
    number, label, seconds, who, file_name = row
    sent = datetime.fromtimestamp(seconds, UTC)
    return ExampleDocument(
        number=number, label=label, time=sent, who=who or None, file_name=file_name or None
    )


def _changed(db: sqlite3.Connection, head: int, added: int | None = None) -> dict[str, int]:
    """Record a change of a head's examples, and return their number by label.

    Args:
        added: number of new examples; None if examples were removed or moved.
    """
    counts = _counts(db, head)
    is_changed = added != 0
    update = (
        "UPDATE heads SET numbers = numbers + ?, revision = revision + ?, reason = ? WHERE id = ?"
    )
    db.execute(update, [added or 0, is_changed, too_few(counts), head])
    return counts


def _counts(db: sqlite3.Connection, head: int) -> dict[str, int]:
    query = (
        "SELECT label, count(*) FROM examples WHERE head = ? GROUP BY label ORDER BY min(number)"
    )
    return dict(db.execute(query, [head]).fetchall())
