"""The SQLite files of the user's cache folder, which several processes read and write.

The cache is a convenience: a file that is damaged, unreadable or of another format counts as empty, and it is no error
if the disk cannot be written to.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
from pathlib import Path
from typing import Any

from ..wire.cache_folder import cache_folder

LOCK_PATIENCE = 2.0  # s; another process holds the lock for milliseconds

Statement = tuple[str, tuple[object, ...]]  # SQL and its values

log = logging.getLogger(__name__)


def keep_latest(table: str, count: int, where: str = "1", *values: object) -> Statement:
    """Returns the statement that deletes all rows of `table` but the latest `count`. `where`: only among these rows;
    `values`: of its placeholders."""
    among = f"SELECT rowid FROM {table} WHERE {where} ORDER BY rowid DESC LIMIT -1 OFFSET ?"
    return f"DELETE FROM {table} WHERE rowid IN ({among})", (*values, count)


class CacheDatabase:
    """One file of the cache folder. `path`: None if nothing is to be stored; `tables`: the SQL statements that make its
    tables; `format`: version of the tables, at least 1; a file with another one is overwritten."""

    def __init__(self, name: str, tables: tuple[str, ...], format: int, folder: Path | None) -> None:
        folder = folder or cache_folder()
        self.path = None if folder is None else folder / name
        self._tables, self._format = tables, format

    def query(self, sql: str, *values: object) -> list[tuple[Any, ...]]:
        """Returns the rows of the answer; none if the file cannot be read."""
        if self.path is None:
            return []
        uri = f"{self.path.absolute().as_uri()}?mode=ro"
        try:
            with contextlib.closing(sqlite3.connect(uri, timeout=LOCK_PATIENCE, uri=True)) as database:
                return database.execute(sql, values).fetchall() if self._is_current(database) else []
        except (sqlite3.Error, UnicodeDecodeError) as error:
            log.debug("%s counts as empty: %s", self.path.name, error)
            return []

    def write(self, *statements: Statement) -> bool:
        """Executes the statements in one transaction. Returns True if it was written; an error of the disk, or a lock
        that another process holds for long, gives False."""
        if self.path is None:
            return False
        try:
            try:
                self._execute(self.path, statements)
            except sqlite3.OperationalError:  # read-only, full, not ours, or locked by a process that hangs
                raise
            except sqlite3.DatabaseError:  # damaged, or of another format
                self.path.unlink()
                self._execute(self.path, statements)
        except (OSError, sqlite3.Error) as error:
            log.debug("%s is not written: %s", self.path.name, error)
            return False
        return True

    def _execute(self, path: Path, statements: tuple[Statement, ...]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
        connection = sqlite3.connect(path, timeout=LOCK_PATIENCE, isolation_level=None)
        with contextlib.closing(connection) as database:  # which takes back an unfinished transaction
            # A job waits for this, so it does not wait for the disk; a power cut may cost the file.
            database.execute("PRAGMA synchronous = OFF")
            database.execute("BEGIN IMMEDIATE")
            if not self._is_current(database):
                if database.execute("PRAGMA user_version").fetchone()[0]:
                    raise sqlite3.DatabaseError("it has another format")
                for table in self._tables:
                    database.execute(table)
                database.execute(f"PRAGMA user_version = {self._format:d}")
            for sql, values in statements:
                database.execute(sql, values)
            database.execute("COMMIT")

    def _is_current(self, database: sqlite3.Connection) -> bool:
        return bool(database.execute("PRAGMA user_version").fetchone()[0] == self._format)
