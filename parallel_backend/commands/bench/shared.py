"""A benchmark result that people can share: a small file without names, paths or prompts."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path

from ...errors import RequestError, TransportError
from ...wire.strict_json import from_json, parse, to_json
from .report import BenchResult, StrategyRow

FORMAT = 1
_MOST_STRATEGIES, _MOST_LINES, _LONGEST = 64, 64, 400  # limits for a file from a stranger


@dataclass(frozen=True)
class SharedStrategy:
    """One strategy. `least_s`, `step_s`, `most_s`: shortest, median and longest warm step in seconds; `difference`: as
    in StrategyRow."""

    name: str
    devices: int
    exact: bool
    least_s: float
    step_s: float
    most_s: float
    difference: float | None


@dataclass(frozen=True)
class SharedResult:
    """The strategies of one machine on one model. `date`: YYYY-MM-DD; the other texts are those of BenchResult."""

    format: int
    date: str
    hardware: tuple[str, ...]
    software: tuple[str, ...]
    links: tuple[str, ...]
    model: str
    request: str
    rounds: int
    strategies: tuple[SharedStrategy, ...]

    @property
    def one_s(self) -> float | None:
        """Seconds of a step on one device; None if it was not measured."""
        return next((one.step_s for one in self.strategies if one.devices == 1), None)


def path_to_share(text: str) -> Path | None:
    """Returns the path that --share names, None for no text. Raises RequestError if `share` could not write to it:
    called before minutes of measuring."""
    if not text:
        return None
    path = Path(text).expanduser()
    if path.is_dir() or not path.parent.is_dir():
        raise RequestError(
            f"--share {path.name!r} names no file in a folder that exists; name one, such as result.json."
        )
    return path


def share(outcome: BenchResult, path: Path) -> None:
    """Writes the strategies that ran to `path`. Raises RequestError if none ran, a latent is not finite, or the file
    cannot be written."""
    found = tuple(_shared(row) for row in outcome.rows if row.step_seconds)
    if not found:
        raise RequestError("--share: no strategy ran, so there is nothing to share.")
    broken = [one.name for one in found if one.difference is not None and not math.isfinite(one.difference)]
    if broken:
        raise RequestError(
            f"--share: {broken[0]} gave a latent that is not finite, which is a bug: report it instead."
        )
    result = SharedResult(
        FORMAT,
        time.strftime("%Y-%m-%d"),
        outcome.hardware,
        outcome.software,
        outcome.links,
        outcome.model,
        outcome.request,
        outcome.rounds,
        found,
    )
    try:
        path.write_text(json.dumps(to_json(result), indent=1) + "\n")
    except OSError as error:
        raise RequestError(f"--share {path.name}: the file cannot be written: {error.strerror}.") from None


def read_shared(text: str) -> SharedResult:
    """Reads the text of a file that `share` wrote. Raises RequestError with the reason for any other text."""
    try:
        result = from_json(parse(text), SharedResult, "the result")
    except (ValueError, RecursionError, TransportError) as error:
        raise RequestError(f"This is no result of bench --share: {error}.") from None
    lines = (result.model, result.request, *result.hardware, *result.software, *result.links)
    in_order = all(0.0 <= one.least_s <= one.step_s <= one.most_s for one in result.strategies)
    wrong = [
        (result.format != FORMAT, f"format {result.format} is unknown; this version reads {FORMAT}"),
        (not _is_date(result.date), f"{result.date!r} is no date"),
        (not 0 < len(result.strategies) <= _MOST_STRATEGIES, f"it has {len(result.strategies)} strategies"),
        (len(lines) > _MOST_LINES, f"it has {len(lines)} lines about the machine"),
        (any(len(line) > _LONGEST for line in lines), f"a line is longer than {_LONGEST} characters"),
        (not in_order, "times are out of order"),
        (0.0 in [one.least_s for one in result.strategies], "a step took no time"),
    ]
    for is_wrong, words in wrong:
        if is_wrong:
            raise RequestError(f"This is no result of bench --share: {words}.")
    return result


def _shared(row: StrategyRow) -> SharedStrategy:
    assert row.step_s is not None, "it ran"
    return SharedStrategy(
        row.name,
        row.strategy.world_size,
        row.strategy.exact,
        min(row.step_seconds),
        row.step_s,
        max(row.step_seconds),
        row.difference,
    )


def _is_date(text: str) -> bool:
    try:
        return time.strftime("%Y-%m-%d", time.strptime(text, "%Y-%m-%d")) == text
    except ValueError:
        return False
