"""`python -m parallel_backend costs`: a table of device-seconds and money from the event log, of a day or of all."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import RequestError
from ..observability.cost import amount, money
from ..observability.logs.event_log import VARIABLE

_MOST_SECONDS = 1e12  # more, and what is no number, is damage
_DAY = re.compile(r"\d{4}-\d\d-\d\d")
_BY: dict[str, Callable[[dict[str, Any]], tuple[str, ...]]] = {
    "model": lambda line: (_text(line, "model"), _text(line, "strategy")),
    "prompt": lambda line: (_text(line, "prompt_id"), _text(line, "model"), _text(line, "strategy")),
    "day": lambda line: (_text(line, "time")[:10],),
}
_HEADS = {"model": ("model", "strategy"), "prompt": ("prompt", "model", "strategy"), "day": ("day",)}


@dataclass
class CostRow:
    """What one group of requests took. Device-seconds; `failed`: of those that gave nothing; `images`: of those that
    were done, 0 where only single model calls were made, which know of none; `cost`: None without a price."""

    key: tuple[str, ...]
    images: int = 0
    done: float = 0.0
    failed: float = 0.0
    idle: float = 0.0
    cost: float | None = None

    @property
    def each(self) -> float | None:
        """Device-seconds an image, those of failed ones included."""
        return (self.done + self.failed) / self.images if self.images else None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "logs", nargs="+", help=f"files that {VARIABLE} named, old ones too; - for standard input"
    )
    parser.add_argument("--day", help="of UTC, YYYY-MM-DD; all days if not given")
    parser.add_argument(
        "--by", choices=tuple(_BY), default="model", help="model and strategy, prompt, or day"
    )
    parser.add_argument("--price", type=float, help="of a device-hour, in place of the one in the log")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")


def run(args: argparse.Namespace) -> int:
    """Prints the table. Raises RequestError for a file, a day or a price that makes no sense."""
    if args.day is not None and not _DAY.fullmatch(args.day):
        raise RequestError(f"--day {args.day!r} is no day; write it as 2026-11-21.")
    if args.price is not None and not (math.isfinite(args.price) and args.price >= 0):
        raise RequestError(f"--price {args.price} is no price; it must be 0 or more.")
    damaged: list[str] = []
    rows = add_up(_lines(args.logs, damaged), by=args.by, day=args.day, price=args.price)
    if damaged:
        sys.stderr.write(
            f"{len(damaged)} lines are not of this log and were left out, the first in {damaged[0]}\n"
        )
    total = _total(rows)
    if args.json:
        found = [{**asdict(row), "key": dict(zip(_HEADS[args.by], row.key, strict=True))} for row in rows]
        text = json.dumps({"rows": found, "total": {**asdict(total), "key": {}}, "damaged": len(damaged)})
    else:
        text = _table((*_HEADS[args.by], *COLUMNS), [*map(_cells, rows), _cells(total, len(_HEADS[args.by]))])
    sys.stdout.write(text + "\n")
    return 0


def add_up(
    lines: Iterable[dict[str, Any]], *, by: str = "model", day: str | None = None, price: float | None = None
) -> list[CostRow]:
    """A row per `by`, the dearest first, and last the time for which ranks waited, which belongs to nobody."""
    rows: dict[tuple[str, ...], CostRow] = {}
    idle = CostRow(("idle", *("" for _ in _HEADS[by][1:])))
    for line in lines:
        event = line.get("event")
        if event not in ("ended", "released") or (day is not None and _text(line, "time")[:10] != day):
            continue
        waited = _number(line, "idle_device_seconds")
        idle.idle += waited
        if price is not None:
            idle.cost = (idle.cost or 0.0) + money(waited, price)
        if event == "released":
            continue
        key = _BY[by](line)
        row = rows.setdefault(key, CostRow(key))
        seconds = _number(line, "device_seconds")
        if line.get("result") == "done":
            row.done += seconds
            row.images += int(_number(line, "images"))
        else:
            row.failed += seconds
        if price is not None or isinstance(line.get("cost"), (int, float)):
            cost = _number(line, "cost") if price is None else money(seconds, price)
            row.cost = (row.cost or 0.0) + cost
    found = sorted(rows.values(), key=lambda row: -(row.done + row.failed))
    return [*found, idle] if idle.idle else found


def _total(rows: list[CostRow]) -> CostRow:
    total = CostRow(("total",))
    for row in rows:
        total.images += row.images
        total.done += row.done
        total.failed += row.failed
        total.idle += row.idle
        if row.cost is not None:
            total.cost = (total.cost or 0.0) + row.cost
    return total


def _lines(names: list[str], damaged: list[str]) -> Iterator[dict[str, Any]]:
    """The objects of all files; where another kind of line stands goes to `damaged`."""
    for name in names:
        try:
            text = sys.stdin.read() if name == "-" else Path(name).read_text("utf-8", errors="replace")
        except OSError as error:
            raise RequestError(
                f"{name} cannot be read ({error.strerror}); {VARIABLE} says where the log is."
            ) from None
        for number, line in enumerate(text.split("\n"), 1):
            try:
                found = json.loads(line) if line.strip() else {}
            except (ValueError, RecursionError):
                found = None
            if isinstance(found, dict):
                yield found
            else:
                damaged.append(f"{name}, line {number}")


def _text(line: dict[str, Any], name: str) -> str:
    value = line.get(name)
    return value if isinstance(value, str) else "–"


def _number(line: dict[str, Any], name: str) -> float:
    value = line.get(name)
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return 0.0
    return float(value) if 0 <= value <= _MOST_SECONDS else 0.0


COLUMNS = ("images", "done s", "failed s", "idle s", "s/image", "cost", "cost/image")


def _cells(row: CostRow, keys: int = 0) -> tuple[str, ...]:
    """`keys`: columns before the numbers, where the row's key has fewer."""
    padding = ("",) * max(0, keys - len(row.key))
    each = row.each
    of_image = None if row.cost is None or not row.images else row.cost / row.images
    return (
        *row.key,
        *padding,
        str(row.images) if row.images else "–",
        *(f"{seconds:.1f}" for seconds in (row.done, row.failed, row.idle)),
        "–" if each is None else f"{each:.2f}",
        *("–" if value is None else amount(value) for value in (row.cost, of_image)),
    )


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    texts = len(head) - len(COLUMNS)
    return "\n".join(
        "  ".join(
            cell.ljust(width) if index < texts else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (head, *rows)
    )
