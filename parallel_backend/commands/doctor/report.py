"""The doctor's report, as text for a terminal, as JSON and as an exit status."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace

from ...wire.checks.findings import STATUSES, Finding

_STATUS_WIDTH = 8


def in_group(group: str, findings: Iterable[Finding]) -> list[Finding]:
    """Returns the findings with `group` as their heading."""
    return [replace(finding, group=group) for finding in findings]


@dataclass(frozen=True)
class Report:
    """All findings, in the order in which they are shown."""

    verdicts: tuple[Finding, ...]

    @property
    def exit_status(self) -> int:
        """1 if something is broken, else 0."""
        return int(any(v.status == "broken" for v in self.verdicts))

    def count(self, status: str) -> int:
        return sum(v.status == status for v in self.verdicts)

    @property
    def summary(self) -> str:
        counts = ", ".join(f"{self.count(s)} {s}" for s in STATUSES if self.count(s))
        if self.exit_status:
            return f"{counts}. Begin with the first line that is broken: later ones often follow from it."
        return f"{counts}. Nothing is broken."

    def as_dict(self) -> dict[str, object]:
        return {
            "exit_status": self.exit_status,
            "summary": self.summary,
            "counts": {status: self.count(status) for status in STATUSES},
            "verdicts": [asdict(v) for v in self.verdicts],
        }

    def as_text(self, width: int = 80) -> str:
        """Returns text of at most `width` columns; the rows of tables may be longer."""
        names = max((len(v.name) for v in self.verdicts), default=0)
        lines: list[str] = []
        group = ""
        for verdict in self.verdicts:
            if verdict.group != group:
                group = verdict.group
                lines += ["", group]
            lines += _lines_of(verdict, names, width)
        return "\n".join([*lines, "", *textwrap.wrap(self.summary, width)]).lstrip("\n")


def _lines_of(verdict: Finding, names: int, width: int) -> Iterable[str]:
    head = f"  {verdict.status:{_STATUS_WIDTH}s}{verdict.name:{names}s}  "
    indent = " " * len(head)
    yield from textwrap.wrap(head + verdict.finding, width, subsequent_indent=indent) or [head.rstrip()]
    yield from (indent + row for row in verdict.details)
    if verdict.remedy:
        yield from textwrap.wrap(
            "→ " + verdict.remedy, width, initial_indent=indent, subsequent_indent=indent + "  "
        )
