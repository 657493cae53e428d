"""Stores outcomes of self-tests of ComfyUI's modules in the cache folder: one file for all ComfyUIs of a user."""

from __future__ import annotations

import logging
from pathlib import Path

from ..errors import ParallelError
from ..wire.checks.findings import SelfTest
from .cache_database import CacheDatabase, keep_latest

FORMAT = 2  # raise it if ranks share out tokens in another way: then everything is tested again
NAME = "self-tests.sqlite"
MAX_OUTCOMES = 200  # enough for several versions of ComfyUI, some classes each; the oldest are dropped first

log = logging.getLogger(__name__)


class SelfTestStore(CacheDatabase):
    """The file of outcomes. A `digest` is of the class's table entry and sources (entry_digest in
    models/proof/states.py)."""

    def __init__(self, folder: Path | None = None) -> None:
        columns = "class_name TEXT, digest TEXT, mode TEXT, worst REAL, error TEXT"
        table = f"CREATE TABLE outcomes ({columns}, UNIQUE (class_name, digest))"
        super().__init__(NAME, (table,), FORMAT, folder)

    def find(self, class_name: str, digest: str) -> SelfTest | None:
        """Returns the outcome of a test of that class with that digest, None if it was not tested."""
        rows = self.query(
            "SELECT mode, worst, error FROM outcomes WHERE class_name = ? AND digest = ?", class_name, digest
        )
        try:
            return SelfTest(class_name, *rows[0]) if rows else None
        except ParallelError as error:
            log.debug("an outcome is left out: %s", error)
            return None

    def keep(self, digest: str, test: SelfTest) -> bool:
        """Stores an outcome and returns True if it was written to disk."""
        values = (test.class_name, digest, test.mode, test.worst, test.error)
        kept = ("INSERT OR REPLACE INTO outcomes VALUES (?, ?, ?, ?, ?)", values)
        return self.write(kept, keep_latest("outcomes", MAX_OUTCOMES))
