"""The SQLite file of taught heads, which several processes may use at once.

A process may end at any moment: the file then holds every committed change, and no other.
"""

import hmac
import os
import re
import secrets
import sqlite3
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Final

from service.errors import SettingsError
from service.extensions.teach.errors import HeadsUnavailable

_FILE: Final = "heads.sqlite3"
# Longest wait of a change for another process; a change takes milliseconds.
_LOCKED_SECONDS: Final = 10.0

# Opening a file of an earlier version adds the columns and tables that it lacks. That version can
# still use the file afterwards.
_VERSION: Final = 1
_TABLES: Final = f"""
BEGIN IMMEDIATE;
CREATE TABLE IF NOT EXISTS heads (
    id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL UNIQUE,
    backbone TEXT NOT NULL, model TEXT NOT NULL, owner TEXT NOT NULL,
    numbers INTEGER NOT NULL DEFAULT 0, revision INTEGER NOT NULL DEFAULT 0,
    fitted_revision INTEGER NOT NULL DEFAULT 0, fitted BLOB, reason TEXT NOT NULL DEFAULT '');
CREATE TABLE IF NOT EXISTS examples (
    head INTEGER NOT NULL REFERENCES heads ON DELETE CASCADE, number INTEGER NOT NULL,
    label TEXT NOT NULL, time REAL NOT NULL, who TEXT NOT NULL, features BLOB NOT NULL,
    UNIQUE (head, number));
CREATE TABLE IF NOT EXISTS pictures (
    head INTEGER NOT NULL, number INTEGER NOT NULL, file_name TEXT NOT NULL,
    thumbnail BLOB NOT NULL, PRIMARY KEY (head, number),
    FOREIGN KEY (head, number) REFERENCES examples (head, number) ON DELETE CASCADE);
CREATE INDEX IF NOT EXISTS examples_by_label ON examples (head, label, number);
CREATE TABLE IF NOT EXISTS secrets (name TEXT PRIMARY KEY, value BLOB NOT NULL);
PRAGMA user_version = {_VERSION};
COMMIT;
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
    """Raise `HeadsUnavailable` in place of errors of files and SQLite."""
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        raise HeadsUnavailable(
            f"taught heads cannot be read or written: {error}; the folders of VIT_TEACH and "
            "VIT_MODELS must exist, and VIT_TEACH needs free space and permission to write"
        ) from None


class HeadsDatabase:
    """The file in a folder; both are created if absent.

    Raises:
        SettingsError: the folder or the file cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / _FILE
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Only the owner may read the file, because it holds a secret.
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            self._open()
            [version] = self._watching.execute("PRAGMA user_version").fetchone()
            if version not in (0, _VERSION):
                raise OSError("it is of another version of vitserve")
            self._prepare()
        except (OSError, sqlite3.Error) as error:
            raise SettingsError(f"VIT_TEACH: {self.path}: cannot be used: {error}") from None

    @kept_on_disk()
    def version(self) -> tuple[int, int]:
        """Return numbers that differ after every change, and after a replacement of the file."""
        inode = self.path.stat().st_ino  # unique while the file is open
        if inode != self._inode:
            self._open()
            self._prepare()
        [version] = self._watching.execute("PRAGMA data_version").fetchone()
        return inode, int(version)

    def owner_of(self, key_owner: str) -> str:
        """Return the stored name of a key's owner.

        A key without a name has a digest, from which nobody can guess the key.

        Args:
            key_owner: `ApiKey.owner` of the key; empty without keys.
        """
        if _DIGEST.fullmatch(key_owner) is None:
            return key_owner
        return f"key-{hmac.digest(self._secret, key_owner.encode(), 'sha256').hex()[:32]}"

    def connect(self) -> sqlite3.Connection:
        """Open the file."""
        db = sqlite3.connect(
            self.path, timeout=_LOCKED_SECONDS, isolation_level=None, check_same_thread=False
        )
        db.executescript("PRAGMA foreign_keys = ON; PRAGMA secure_delete = ON")
        return db

    def reading(self) -> AbstractContextManager[sqlite3.Connection]:
        """Give one unchanging state of the file; raises `HeadsUnavailable`."""
        return self._transaction("BEGIN")

    def writing(self) -> AbstractContextManager[sqlite3.Connection]:
        """Commit all changes in this context, or none if it raises; raises `HeadsUnavailable`.

        No other process changes the file meanwhile.
        """
        return self._transaction("BEGIN IMMEDIATE")

    @contextmanager
    def _transaction(self, begin: str) -> Iterator[sqlite3.Connection]:
        with kept_on_disk(), closing(self.connect()) as db, db:
            db.execute(begin)
            yield db

    def _open(self) -> None:
        self._watching = self.connect()
        self._inode = self.path.stat().st_ino

    def _prepare(self) -> None:
        """Bring the file to this version, and read the secret for digests of owners."""
        self._watching.executescript(_TABLES)
        self._add_columns()
        with self._watching as db:
            db.execute("BEGIN IMMEDIATE")
            secret = secrets.token_bytes(32)
            db.execute("INSERT OR IGNORE INTO secrets VALUES ('owners', ?)", [secret])
            query = "SELECT value FROM secrets WHERE name = 'owners'"
            [self._secret] = db.execute(query).fetchone()
            owners_changed = self._replace_digests(db, "heads", "owner")
            creators_changed = self._replace_digests(db, "heads", "creator")
            if owners_changed or creators_changed:
                self._replace_digests(db, "examples", "who")

    def _replace_digests(self, db: sqlite3.Connection, table: str, column: str) -> bool:
        """Apply `owner_of` to the digests of an earlier version.

        Returns:
            Whether there were any.
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
            if "duplicate column" not in str(error):  # another process has just added it
                raise
            self._watching.rollback()
