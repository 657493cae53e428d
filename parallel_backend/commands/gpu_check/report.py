"""The report of `doctor --gpu`: the findings and the time of each check, as Markdown and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ...wire.checks.findings import STATUSES, Finding
from ..doctor.report import Report

FILES = ("gpu-check.md", "gpu-check.json")


@dataclass(frozen=True)
class CheckResult:
    """The result of one check that ran or was skipped. `seconds`: 0 if it was skipped."""

    check: str
    group: str
    seconds: float
    verdicts: tuple[Finding, ...]


@dataclass(frozen=True)
class GpuReport:
    """The whole report. `subject`: lines that describe what was checked; `planned`: number of checks to run."""

    subject: tuple[str, ...]
    results: tuple[CheckResult, ...] = ()
    planned: int = 0

    @property
    def exit_status(self) -> int:
        """1 if something is broken, else 0."""
        return self._all.exit_status

    @property
    def summary(self) -> str:
        missing = self.planned - len(self.results)
        cut = f" {missing} of {self.planned} checks did not run: it was ended before." if missing else ""
        return f"{self._all.summary}{cut}"

    @property
    def _all(self) -> Report:
        return Report(tuple(v for result in self.results for v in result.verdicts))

    def as_dict(self) -> dict[str, object]:
        return {
            "subject": list(self.subject),
            "exit_status": self.exit_status,
            "complete": len(self.results) == self.planned,
            "counts": {status: self._all.count(status) for status in STATUSES},
            "checks": [asdict(result) for result in self.results],
        }

    def as_markdown(self) -> str:
        lines = ["# GPU check of Parallel Sampling", "", *(f"- {line}" for line in self.subject)]
        lines += ["", f"**{self.summary}**"]
        group = ""
        for result in self.results:
            if result.group != group:
                group = result.group
                lines += ["", f"## {group}"]
            took = f" ({result.seconds:.1f} s)" if result.seconds else ""
            lines += ["", f"### {result.check}{took}", ""]
            for verdict in result.verdicts:
                lines += _in_markdown(verdict)
        return "\n".join(lines) + "\n"

    def write(self, folder: Path) -> None:
        """Writes both files. Each is replaced as a whole, so that a reader never sees half a report."""
        for name, text in zip(FILES, (self.as_markdown(), json.dumps(self.as_dict(), indent=1)), strict=True):
            partial = folder / f".{name}.part"
            partial.write_text(text)
            partial.replace(folder / name)


def _in_markdown(verdict: Finding) -> Sequence[str]:
    finding = " ".join(verdict.finding.split())  # a cause of several lines becomes one list entry
    lines = [f"- **{verdict.status}** {verdict.name}: {finding}"]
    if verdict.remedy:
        lines.append(f"  → {verdict.remedy}")
    if verdict.details:
        lines += ["", "  ```", *(f"  {line}" for line in verdict.details), "  ```", ""]
    return lines
