"""Keeps measurements on disk between runs: one JSON file per fingerprint in the user's cache folder.

What is there is a convenience: a file that is damaged, of another version or unreadable counts as empty, and a disk
that cannot be written to is no error. Nothing in it names a person, a machine, a file or a prompt.
"""

from __future__ import annotations

import functools
import json
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from ..errors import TransportError
from ..machine.cache_files import cache_folder, locked, replace_whole
from ..machine.fingerprint import Fingerprint
from ..wire.strict_json import from_json, parse, to_json
from .records import LinkRate, Measurements, Observed

FORMAT = 4  # of other versions nothing is read, and the next run writes over them
MAX_BYTES = 8 * 1024**2  # KEPT_KINDS of KEPT_RUNS runs are a tenth of it

log = logging.getLogger(__name__)
Entry = TypeVar("Entry")


class MeasurementStore:
    """The measurements of one fingerprint on disk. Any number of processes may use it at once."""

    def __init__(self, fingerprint: Fingerprint, folder: Path | None = None) -> None:
        self._fingerprint = fingerprint
        self._folder = folder or cache_folder()

    @property
    def path(self) -> Path | None:
        return (
            None if self._folder is None else self._folder / f"measurements-{self._fingerprint.digest}.json"
        )

    def read(self) -> Measurements:
        """The measurements that are kept; empty where there is nothing, or nothing that can be read."""
        if self.path is None:
            return Measurements()
        try:
            with self.path.open("rb") as file:
                data = file.read(MAX_BYTES + 1)
        except OSError:
            return Measurements()
        return _decode(data)

    def update(self, change: Callable[[Measurements], Measurements]) -> bool:
        """Replaces what is kept by `change` of it; whether that reached the disk. Never raises for the disk's sake."""
        if self.path is None:
            return False
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with locked(self.path.with_suffix(".lock")):
                replace_whole(self.path, self._encode(change(self.read())))
        except OSError as error:  # read-only, full, not ours, or locked by a process that hangs
            log.debug("measurements are not kept: %s", error)
            return False
        return True

    def _encode(self, known: Measurements) -> bytes:
        measured = to_json(known)
        assert isinstance(measured, dict)
        frame = {
            "format": FORMAT,
            "written": int(time.time()),
            "hardware": list(self._fingerprint.hardware),
            "software": list(self._fingerprint.software),
            **measured,
        }
        return json.dumps(frame, allow_nan=False).encode()


@functools.lru_cache(maxsize=2)
def _decode(data: bytes) -> Measurements:
    """Entry by entry, so that one which this version does not know costs only itself."""
    try:
        frame = parse(data.decode()) if len(data) <= MAX_BYTES else None
    except (ValueError, RecursionError):
        frame = None
    if not isinstance(frame, dict) or frame.get("format") != FORMAT:
        return Measurements()
    runs = (run for run in _entries(frame.get("observed"), Observed) if _can_be(run))
    links = (one for one in _entries(frame.get("links"), LinkRate) if one.bytes_per_second > 0)
    return Measurements(tuple(runs), tuple(links))


def _entries(entries: object, kind: type[Entry]) -> Iterator[Entry]:
    for entry in entries if isinstance(entries, list) else []:
        try:
            yield from_json(entry, kind, kind.__name__)
        except TransportError as error:
            log.debug("a measurement is left out: %s", error)


def _can_be(run: Observed) -> bool:
    return 0 < len(run.seconds) == len(run.at) and all(s > 0 for s in run.seconds)
