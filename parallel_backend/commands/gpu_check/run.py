"""Runs the list of checks, goes on after any failure, and writes the report anew after each check."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ...devices import is_cpu
from ...errors import ParallelError, RequestError
from ...models.registry import inspect_model
from ...options import COMPILE_BACKEND
from ...wire.checks.findings import STATUSES, CheckSubject, Finding
from ..doctor.rank_probe import DEMO_MODEL
from ..doctor.report import Report, find_private, in_group, scrub, scrub_findings
from . import faults, one_device, several_devices
from .ranks import Check, Ranks, environment

# All checks by the heading of the report, in the order in which they run.
GROUPS: Mapping[str, Sequence[Check]] = {
    "Installation": (Check("installation", one_device.check_installation),),
    "One GPU": (
        Check("device", lambda ranks: ranks.check("device", len(ranks.subject.devices)), limit_s=180.0),
        Check("attention", lambda ranks: ranks.check("attention", len(ranks.subject.devices)), limit_s=300.0),
        Check("identity", one_device.check_identity, needs_gpu=True),
        Check("checkpoint", one_device.check_checkpoint),
        Check("steps", one_device.check_steps, limit_s=900.0),
        Check("syncs", lambda ranks: ranks.check("syncs", ranks.count)),
        Check("same bits", one_device.check_same_bits),
    ),
    "Weights and memory": (
        Check("fp8", one_device.check_fp8),
        Check("offload", one_device.check_offload),
        Check("sleep", one_device.check_sleep),
        Check("comfyui", one_device.check_comfyui),
    ),
    "Several GPUs": (
        Check("links", several_devices.check_all_links, needs_two=True),
        Check("strategies", several_devices.check_strategies, needs_two=True, limit_s=1200.0),
        *(
            Check(f"pipefusion {w} {p}", several_devices.pipefusion(w, p), needs_two=True, limit_s=300.0)
            for w, p in several_devices.PIPES
        ),
        Check("one process", several_devices.check_one_process, needs_two=True, limit_s=1200.0),
    ),
    "Faults": (
        Check("cancel", faults.check_cancel),
        Check("kill", faults.check_kill),
        Check("out of memory", faults.check_out_of_memory),
    ),
    "Time": (Check("profile", lambda ranks: ranks.check("profile", ranks.count), limit_s=900.0),),
}
FILES = ("gpu-check.md", "gpu-check.json")
_FRAMES = 12  # last lines of a traceback to show


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


def make_subject(devices: tuple[str, ...], model: str = "") -> CheckSubject:
    """Returns what to check on `devices`: pictures of the usual size on GPUs, small ones on the CPU. `model`: path of a
    model file, the demo model if empty."""
    on_gpus = not is_cpu(devices)
    return CheckSubject(
        devices=devices,
        model=str(Path(model).expanduser().resolve()) if model else str(DEMO_MODEL),
        is_demo=not model,
        pixels=1024 if on_gpus else 128,
        odd_pixels=(1000, 1016) if on_gpus else (120, 136),
        text=512 if on_gpus else 24,
        steps=4,
        attention_tokens=4608 if on_gpus else 384,
    )


def choose(only: Collection[str]) -> list[tuple[str, Check]]:
    """Returns (heading, check) for those named in `only`, by either; all if empty. Raises RequestError."""
    every = [(group, check) for group, checks in GROUPS.items() for check in checks]
    requested = {name.strip().lower() for name in only}
    known = {check.name for _, check in every} | {group.lower() for group in GROUPS}
    if requested - known:
        names = ", ".join(dict.fromkeys([check.name for _, check in every]))
        raise RequestError(f"--only {min(requested - known)!r} is no check; choose from {names}.")
    return [
        (group, check) for group, check in every if not requested or {check.name, group.lower()} & requested
    ]


def run_checks(
    subject: CheckSubject,
    checks: Sequence[tuple[str, Check]],
    *,
    on_begin: Callable[[str, int, int], None] = lambda name, number, count: None,
    on_report: Callable[[GpuReport], None] = lambda report: None,
) -> GpuReport:
    """Runs `checks` and returns the report; `on_report` gets it after each check. `on_begin` gets a check's name, its
    number from 1, and the number of checks."""
    private = find_private(model="" if subject.is_demo else subject.model)
    report = GpuReport(tuple(scrub(line, private) for line in _words(subject)), planned=len(checks))
    ranks = Ranks(subject)
    with ExitStack() as stack:
        stack.callback(ranks.close)
        if is_cpu(subject.devices) and COMPILE_BACKEND not in os.environ:
            # Inductor would take a minute, and ranks on the CPU have no use for it.
            stack.enter_context(environment(COMPILE_BACKEND, "aot_eager"))
        for number, (group, check) in enumerate(checks, 1):
            on_begin(check.name, number, len(checks))
            began = time.monotonic()
            findings = tuple(_examine(check, ranks))
            skipped = all(finding.status == "skipped" for finding in findings)
            result = CheckResult(
                check.name,
                group,
                0.0 if skipped else round(time.monotonic() - began, 2),
                scrub_findings(in_group(group, findings), private),
            )
            report = replace(report, results=(*report.results, result))
            on_report(report)
    return report


def _examine(check: Check, ranks: Ranks) -> Iterator[Finding]:
    """Yields the findings of `check`. After an error the next check gets new ranks: the state of these is unknown."""
    if reason := check.why_not(ranks.subject):
        yield Finding(check.name, "skipped", reason)
        return
    ranks.deadline = time.monotonic() + check.limit_s
    try:
        yield from check.examine(ranks)
    except Exception as error:
        ranks.close()
        yield _failed(check.name, error)


def _failed(name: str, error: Exception) -> Finding:
    """Returns the finding for the error that ended a check, with the lines that say where it was raised."""
    words = str(error).strip() if isinstance(error, ParallelError) else f"{type(error).__name__}: {error}"
    first, *where = words.splitlines() or [""]  # where a rank failed or hangs, it says so itself
    where = where or "".join(traceback.format_exception(error)).splitlines()
    remedy = "report it with this text; the checks after it ran in new processes"
    return Finding(name, "broken", first[:600], remedy, tuple(line[:300] for line in where[-_FRAMES:]))


def _words(subject: CheckSubject) -> Sequence[str]:
    height, width = subject.odd_pixels
    side = subject.pixels
    try:
        file = inspect_model(subject.model)
        sizes = f"{file.describe()}, {file.dtype}, {file.tensor_bytes / 1e9:.3g} GB"
    except ParallelError as error:  # the checks will fail and report the reason
        sizes = str(error)
    whose = "the demo model" if subject.is_demo else "a file"
    return (
        f"devices: {', '.join(subject.devices)}",
        f"model: {whose}, {sizes}",
        f"pictures: {side} × {side} and {width} × {height}, {subject.text} tokens of text, {subject.steps} steps, CFG",
    )
