"""Stores measurements between runs: one SQLite file per fingerprint in the user's cache folder.

The file identifies no person, machine, file or prompt.
"""

from __future__ import annotations

import functools
import json
import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from ..errors import TransportError
from ..machine.cache_database import CacheDatabase, Statement, keep_latest
from ..machine.fingerprint import Fingerprint, device_key
from ..strategy import ParallelStrategy
from ..wire.strict_json import from_json, parse, to_json
from .workload.workload import Job

FORMAT = 5  # files of other versions are not read, and the next run overwrites them
MAX_AGE_S = 30 * 86400.0  # drivers, cooling and neighbours change within a month
MAX_RUNS = 20  # of a kind: the median of this many is steady, and follows a change within ten runs
MAX_ALL_RUNS = 8000  # of all kinds: a person's models, sizes and strategies; the oldest are dropped first
MAX_LINKS = 20  # groups of devices whose link was measured

_TABLES = (
    "CREATE TABLE runs (workload TEXT, engine TEXT, strategy TEXT, devices TEXT, seconds REAL, at REAL)",
    "CREATE INDEX kinds ON runs (workload, engine, strategy, devices)",
    "CREATE INDEX times ON runs (at)",
    "CREATE TABLE links (devices TEXT UNIQUE, bytes_per_second REAL, latency_s REAL, at REAL)",
)
_KIND = "workload = ? AND engine = ? AND strategy = ? AND devices = ?"
# If the clock was set back, a stored time lies in the future; up to a day of that is accepted.
_RECENT = f"at BETWEEN ? - {MAX_AGE_S} AND ? + 86400.0"

log = logging.getLogger(__name__)

# The sizes of a job that decide the time of a step, in the order in which a file has them.
_SIZES = ("width", "height", "frames", "batch", "prompts", "text_tokens", "reference_tokens", "model_calls")


@dataclass(frozen=True)
class RunKind:
    """A kind of runs whose step times can be compared. `workload`: what was computed, from workload_of; `devices`:
    device_key() of the devices in use."""

    workload: str
    engine: str
    strategy: ParallelStrategy
    devices: str

    @classmethod
    def of(cls, job: Job, strategy: ParallelStrategy, engine: str, devices: Sequence[str]) -> RunKind:
        workload = workload_of(job.model.key, **{name: getattr(job, name) for name in _SIZES})
        return cls(workload, engine, strategy, device_key(devices[: strategy.world_size]))


def workload_of(model: str, **sizes: int) -> str:
    """Returns a model (CheckpointModel.key) and sizes, as in Job, as JSON."""
    return json.dumps({"model": model, **sizes})


@dataclass(frozen=True)
class LinkRate:
    """The exchange rate of some devices when all exchange at once. `devices`: device_key() in rank order;
    `bytes_per_second`: sent by the slowest device; `latency_s`: of a collective of one number; `at`: Unix time of the
    measurement."""

    devices: str
    bytes_per_second: float
    latency_s: float
    at: float


class MeasurementStore(CacheDatabase):
    """The measurements of one fingerprint on disk. `now`: Unix time."""

    def __init__(self, fingerprint: Fingerprint, folder: Path | None = None) -> None:
        super().__init__(f"measurements-{fingerprint.digest}.sqlite", _TABLES, FORMAT, folder)

    def record(self, runs: Sequence[tuple[RunKind, float]], now: float) -> bool:
        """Stores runs, each with the seconds of its median warm step, and forgets old ones. Returns True if that
        reached the disk."""
        statements: list[Statement] = []
        for kind, seconds in runs:
            if not 0 < seconds < float("inf"):
                continue
            key = _key(kind)
            statements += [
                ("INSERT INTO runs VALUES (?, ?, ?, ?, ?, ?)", (*key, seconds, now)),
                keep_latest("runs", MAX_RUNS, _KIND, *key),
            ]
        statements += [
            ("DELETE FROM runs WHERE at < ?", (now - MAX_AGE_S,)),
            (
                "DELETE FROM runs WHERE at <= (SELECT at FROM runs ORDER BY at DESC LIMIT 1 OFFSET ?)",
                (MAX_ALL_RUNS,),
            ),
        ]
        return self.write(*statements)

    def seconds(self, kind: RunKind, now: float) -> float | None:
        """Returns the median seconds of a step of the recent runs of `kind`, None if there is none."""
        rows = self.query(f"SELECT seconds FROM runs WHERE {_KIND} AND {_RECENT}", *_key(kind), now, now)
        return median(seconds for (seconds,) in rows) if rows else None

    def seconds_by_strategy(
        self, kind: RunKind, ids: Sequence[str], now: float
    ) -> dict[ParallelStrategy, float]:
        """Returns the median seconds of a step of runs that differ from `kind` by strategy, on the first of the devices
        `ids`. Leaves out uneven shares and offloaded weights: `auto` does not rank them."""
        rows = self.query(
            "SELECT strategy, devices, seconds FROM runs"
            f" WHERE workload = ? AND engine = ? AND {_RECENT} ORDER BY rowid",
            *(kind.workload, kind.engine, now, now),
        )
        found: dict[ParallelStrategy, list[float]] = defaultdict(list)
        for text, devices, seconds in rows:
            strategy = _strategy(text)
            if strategy is None or strategy.device_shares or strategy.offload_weights:
                continue
            if strategy.world_size <= len(ids) and device_key(ids[: strategy.world_size]) == devices:
                found[strategy].append(seconds)
        return {strategy.canonical: median(times) for strategy, times in found.items()}

    def keep_link(self, link: LinkRate) -> bool:
        """Stores `link` in place of that of the same devices. Returns True if that reached the disk."""
        values = (link.devices, link.bytes_per_second, link.latency_s, link.at)
        kept = ("INSERT OR REPLACE INTO links VALUES (?, ?, ?, ?)", values)
        return self.write(kept, keep_latest("links", MAX_LINKS))

    def link(self, devices: str) -> LinkRate | None:
        """Returns the measured link of the devices with that device_key(), None if it was never measured."""
        rows = self.query("SELECT * FROM links WHERE devices = ?", devices)
        return LinkRate(*rows[0]) if rows else None


def _key(kind: RunKind) -> tuple[str, str, str, str]:
    """Returns the columns of _KIND."""
    return kind.workload, kind.engine, json.dumps(to_json(kind.strategy)), kind.devices


@functools.lru_cache(maxsize=256)
def _strategy(text: str) -> ParallelStrategy | None:
    """Returns a stored strategy, None if this version cannot read it."""
    try:
        return from_json(parse(text), ParallelStrategy, "strategy")
    except (TransportError, ValueError) as error:
        log.debug("a run is left out: %s", error)
        return None
