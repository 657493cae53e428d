"""Stores outcomes of self-tests of ComfyUI's modules in the cache folder: one file for all ComfyUIs of a user."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..wire.checks.self_test import SelfTest
from ..wire.strict_json import to_json
from .cache_files import CacheFile, read_entries, read_frame

FORMAT = 1  # raise it if ranks share out tokens in another way: then everything is tested again
NAME = "self-tests.json"
MAX_OUTCOMES = 200  # enough for several versions of ComfyUI, some classes each; the oldest are dropped first


@dataclass(frozen=True)
class StoredSelfTest:
    """One outcome. `digest`: of the class's table entry and sources (entry_digest in models/proof/states.py)."""

    digest: str
    test: SelfTest


class SelfTestStore(CacheFile):
    """The file of outcomes."""

    def __init__(self, folder: Path | None = None) -> None:
        super().__init__(NAME, FORMAT, folder)

    def find(self, class_name: str, digest: str) -> SelfTest | None:
        """Returns the outcome of a test of that class with that digest, None if it was not tested."""
        for outcome in self._read():
            if (outcome.test.class_name, outcome.digest) == (class_name, digest):
                return outcome.test
        return None

    def keep(self, digest: str, test: SelfTest) -> bool:
        """Stores an outcome and returns True if it was written to disk."""
        found = (test.class_name, digest)

        def with_this_one() -> dict[str, object]:
            other_outcomes = [one for one in self._read() if (one.test.class_name, one.digest) != found]
            return {"outcomes": to_json((*other_outcomes, StoredSelfTest(digest, test))[-MAX_OUTCOMES:])}

        return self.replace(with_this_one)

    def _read(self) -> list[StoredSelfTest]:
        frame = read_frame(self.read_bytes(), FORMAT)
        return list(read_entries(frame.get("outcomes"), StoredSelfTest))
