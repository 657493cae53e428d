"""Outcomes of self-tests of ComfyUI's modules, kept beside the measurements: one JSON file for all ComfyUIs of a user.

As there, a file that is damaged or of another version counts as empty, and a disk that cannot be written to is no
error.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import TransportError
from ..wire.checks.self_test import SelfTest
from ..wire.strict_json import from_json, parse, to_json
from .cache_files import cache_folder, locked, replace_whole

FORMAT = 1  # to be raised where the ranks come to share out tokens in another way: all is tested anew then
NAME = "self-tests.json"
KEPT = 200  # a person's versions of ComfyUI, with some classes each; the oldest are forgotten first
MAX_BYTES = 1024**2

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StoredSelfTest:
    """`digest`: of the class's sources (models/comfyui/proof.entry_digest)."""

    digest: str
    test: SelfTest


class SelfTestStore:
    """Any number of processes may use it at once."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or cache_folder()

    @property
    def path(self) -> Path | None:
        """None where nothing is to be kept."""
        return None if self._folder is None else self._folder / NAME

    def find(self, class_name: str, digest: str) -> SelfTest | None:
        """What a test of that class in those sources found."""
        for outcome in self._read():
            if (outcome.test.class_name, outcome.digest) == (class_name, digest):
                return outcome.test
        return None

    def keep(self, digest: str, test: SelfTest) -> bool:
        """Whether it reached the disk. Never raises for the disk's sake."""
        if self.path is None:
            return False
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with locked(self.path.with_suffix(".lock")):
                others = [
                    o for o in self._read() if (o.test.class_name, o.digest) != (test.class_name, digest)
                ]
                kept = [*others, StoredSelfTest(digest, test)][-KEPT:]
                frame = {"format": FORMAT, "outcomes": to_json(tuple(kept))}
                replace_whole(self.path, json.dumps(frame, allow_nan=False, indent=1).encode())
        except OSError as error:  # read-only, full, not ours, or locked by a process that hangs
            log.debug("a self-test's outcome is not kept: %s", error)
            return False
        return True

    def _read(self) -> list[StoredSelfTest]:
        if self.path is None:
            return []
        try:
            with self.path.open("rb") as file:
                data = file.read(MAX_BYTES + 1)
            frame = parse(data.decode()) if len(data) <= MAX_BYTES else None
        except (OSError, ValueError, RecursionError):
            return []
        if not isinstance(frame, dict) or frame.get("format") != FORMAT:
            return []
        return list(_outcomes(frame.get("outcomes")))


def _outcomes(entries: object) -> Iterator[StoredSelfTest]:
    """Entry by entry, so that one which this version does not know costs only itself."""
    for entry in entries if isinstance(entries, list) else []:
        try:
            yield from_json(entry, StoredSelfTest, "a self-test")
        except TransportError as error:
            log.debug("a self-test's outcome is left out: %s", error)
