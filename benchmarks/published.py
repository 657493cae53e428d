"""Published measurements as jobs and strategies; groups of strategies for the same job."""

from __future__ import annotations

import csv
import re
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from catalog import WEIGHT_BYTES, guess_family, split_name
from catalog_model import CatalogModel

from parallel_backend.errors import RequestError
from parallel_backend.machine.cards import find_card
from parallel_backend.options import ComputeOptions
from parallel_backend.planner.plan import USABLE_MEMORY
from parallel_backend.planner.workload.workload import Job
from parallel_backend.strategy import ParallelStrategy

DATA = Path(__file__).with_name("data") / "published_benchmarks.csv"
UNKNOWN_MEMORY = 80  # GB, assumed for a card that is not in machine/cards.py
OUT_OF_MEMORY = re.compile(r"\boom\b|out of memory|does not fit", re.IGNORECASE)
# Engines that replay captured or compiled graphs; every other mode launches kernel by kernel.
COMPILED = ("compile", "sgl", "lightx2v")


@dataclass(frozen=True)
class Row:
    """One measurement. `memory`: usable bytes of each card; `seconds`: None if only a speed-up is given."""

    source: str
    key: tuple[str, ...]  # what must be equal for two rows to be the same job
    strategy: ParallelStrategy
    job: Job
    memory: float
    seconds: float | None
    speedup: float | None
    label: str
    failed: bool = False  # it was tried and ran out of memory
    gathered_ring: bool = (
        False  # keys and values are gathered before attention, not passed round while it runs
    )

    @property
    def gpus(self) -> int:
        return self.strategy.world_size


@dataclass(frozen=True)
class Group:
    """Measured strategies for one job with at most `count` devices. `contested`: True if two or more use them all."""

    source: str
    count: int
    rows: tuple[Row, ...]

    @property
    def contested(self) -> bool:
        return sum(row.gpus == self.count for row in self.rows) > 1


def read_rows(path: Path) -> tuple[list[Row], list[str]]:
    """Returns the rows that name one strategy, and for each other row why it was left out."""
    rows, left_out = [], []
    with path.open(newline="", encoding="utf-8") as file:
        for number, record in enumerate(csv.DictReader(file), start=2):
            row = _row(record)
            if isinstance(row, Row):
                rows.append(row)
            else:
                left_out.append(f"line {number}: {record['source']}, {record['model']}: {row}")
    return rows, left_out


def _row(record: dict[str, str]) -> Row | str:
    degrees = {name: _whole(record.get(name), 1) for name in ("cfg", "ulysses", "ring", "pipefusion", "tp")}
    if 0 in degrees.values():
        return "the split is not stated, or is one that is not modelled"
    strategy = ParallelStrategy(
        cfg_degree=degrees["cfg"],
        pipefusion_degree=degrees["pipefusion"],
        ring_degree=degrees["ring"],
        ulysses_degree=degrees["ulysses"],
        tensor_degree=degrees["tp"],
    )
    if strategy.world_size != _whole(record["n_gpus"], 0):
        return f"the degrees give {strategy.world_size} devices and {record['n_gpus']} are stated"
    seconds, speedup = _number(record["latency_s"]), _number(record["speedup"])
    failed = bool(OUT_OF_MEMORY.search(f"{record['mode']} {record.get('note') or ''}"))
    if not seconds and not speedup and not failed:
        return "neither a time nor a speed-up"
    job = _job(record)
    if not job.model.family.is_transformer and strategy.world_size > strategy.row_degree:
        return "a UNet can only be split by rows"
    keys = ("source", "model", "gpu", "interconnect", "resolution", "frames", "steps", "mode", "measure")
    return Row(
        source=record["source"],
        key=(*(record[k] for k in keys), record.get("true_cfg", "")),
        strategy=strategy,
        job=job,
        memory=_memory(record),
        seconds=seconds,
        speedup=speedup,
        label=f"{record['source']} {record['model']} {record['gpu']} {record['interconnect']} {record['mode']}",
        failed=failed and not seconds and not speedup,
        gathered_ring=record.get("ring_impl") == "allgather",
    )


def _job(record: dict[str, str]) -> Job:
    family = guess_family(record["model"])
    width, height, frames = family.default_size
    if size := re.fullmatch(r"(\d+)x(\d+)", record["resolution"]):
        width, height, frames = int(size[1]), int(size[2]), 1
    _, storage = split_name(record["model"])
    if "fp8" in record["mode"]:
        storage = "fp8"
    compiled = any(word in record["mode"] for word in COMPILED)
    return Job(
        CatalogModel(family, WEIGHT_BYTES[storage], ComputeOptions("blocks" if compiled else "off")),
        width,
        height,
        _whole(record["frames"], frames),
        prompts=min(2, _whole(record.get("true_cfg"), 1)),
        steps=_whole(record["steps"], family.default_steps),
    )


def _memory(record: dict[str, str]) -> float:
    """Returns usable bytes: as the measurement states ("4090 48GB"), no limit for offloaded weights, or the card's."""
    if record["mode"] == "offload":
        return float("inf")
    if stated := re.search(r"\b(\d+) ?GB?\b", record.get("note") or ""):
        return float(stated[1]) * 1e9
    try:
        size = find_card(record["gpu"]).memory
    except RequestError:
        size = UNKNOWN_MEMORY
    return size * 1e9 * USABLE_MEMORY


def _number(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if value > 0 else None


def _whole(text: str | None, otherwise: int) -> int:
    return int(float(text)) if text and re.fullmatch(r"\d+(\.0*)?", text) else otherwise


def find_groups(rows: list[Row]) -> list[Group]:
    """Returns the strategies measured for a job on at most `count` devices, for each count; only if two or more."""
    jobs = defaultdict(list)
    for row in rows:
        jobs[row.key].append(row)
    groups = []
    for same in jobs.values():
        timed = [row for row in same if row.seconds] or [row for row in same if row.speedup]
        failed = [row for row in same if row.failed]
        for count in sorted({row.gpus for row in timed if row.gpus > 1}):
            members = [row for row in failed + timed if row.gpus <= count]
            distinct = {(row.strategy, row.gathered_ring): row for row in members}
            if len(distinct) > 1:
                groups.append(Group(same[0].source, count, tuple(distinct.values())))
    return groups


def time_of(row: Row) -> float:
    """Returns seconds, or units of the one-device time if only speed-ups are published; infinite if the run failed."""
    return float("inf") if row.failed else row.seconds or 1 / row.speedup
