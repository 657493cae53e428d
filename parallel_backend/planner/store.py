"""Stores measurements between runs: one JSON file per fingerprint in the user's cache folder.

The file identifies no person, machine, file or prompt.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path

from ..machine.cache_files import CacheFile, read_entries, read_frame
from ..machine.fingerprint import Fingerprint
from ..wire.strict_json import to_json
from .records import LinkRate, Measurements, Observed

FORMAT = 4  # files of other versions are not read, and the next run overwrites them


class MeasurementStore(CacheFile):
    """The measurements of one fingerprint on disk."""

    def __init__(self, fingerprint: Fingerprint, folder: Path | None = None) -> None:
        super().__init__(f"measurements-{fingerprint.digest}.json", FORMAT, folder)
        self._fingerprint = fingerprint

    def read(self) -> Measurements:
        """Returns the stored measurements; empty if there are none or they cannot be read."""
        return _decode(self.read_bytes())

    def update(self, change: Callable[[Measurements], Measurements]) -> bool:
        """Stores `change` of the stored measurements. Returns True if that reached the disk; raises no disk errors."""
        return self.replace(lambda: self._fields(change(self.read())))

    def _fields(self, known: Measurements) -> dict[str, object]:
        measured = to_json(known)
        assert isinstance(measured, dict)
        return {
            "written": int(time.time()),
            "hardware": list(self._fingerprint.hardware),
            "software": list(self._fingerprint.software),
            **measured,
        }


@functools.lru_cache(maxsize=2)
def _decode(data: bytes) -> Measurements:
    frame = read_frame(data, FORMAT)
    runs = (run for run in read_entries(frame.get("observed"), Observed) if _can_be(run))
    links = (one for one in read_entries(frame.get("links"), LinkRate) if one.bytes_per_second > 0)
    return Measurements(tuple(runs), tuple(links))


def _can_be(run: Observed) -> bool:
    return 0 < len(run.seconds) == len(run.at) and all(s > 0 for s in run.seconds)
