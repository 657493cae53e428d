"""Outcomes of self-tests of ComfyUI's modules, kept beside the measurements: one file for all ComfyUIs of a user."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..wire.checks.self_test import SelfTest
from ..wire.strict_json import to_json
from .cache_files import CacheFile, read_entries, read_frame

FORMAT = 1  # to be raised where the ranks come to share out tokens in another way: all is tested anew then
NAME = "self-tests.json"
MAX_OUTCOMES = 200  # a person's versions of ComfyUI, with some classes each; the oldest are forgotten first


@dataclass(frozen=True)
class StoredSelfTest:
    """`digest`: of the class's sources (models/comfyui/proof.entry_digest)."""

    digest: str
    test: SelfTest


class SelfTestStore(CacheFile):
    """The outcomes on disk."""

    def __init__(self, folder: Path | None = None) -> None:
        super().__init__(NAME, FORMAT, folder)

    def find(self, class_name: str, digest: str) -> SelfTest | None:
        """What a test of that class in those sources found."""
        for outcome in self._read():
            if (outcome.test.class_name, outcome.digest) == (class_name, digest):
                return outcome.test
        return None

    def keep(self, digest: str, test: SelfTest) -> bool:
        """Returns True if it reached the disk."""
        found = (test.class_name, digest)

        def with_this_one() -> dict[str, object]:
            others = [one for one in self._read() if (one.test.class_name, one.digest) != found]
            return {"outcomes": to_json((*others, StoredSelfTest(digest, test))[-MAX_OUTCOMES:])}

        return self.replace(with_this_one)

    def _read(self) -> list[StoredSelfTest]:
        frame = read_frame(self.read_bytes(), FORMAT)
        return list(read_entries(frame.get("outcomes"), StoredSelfTest))
