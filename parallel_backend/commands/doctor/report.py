"""The doctor's report, as text for a terminal, as JSON and as an exit status, without names of people and machines."""

from __future__ import annotations

import getpass
import os
import re
import socket
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType

from ...wire.checks.findings import STATUSES, Finding

_STATUS_WIDTH = 8
_PACK_ROOT = Path(__file__).resolve().parents[3]
# Paths below any home folder, and serial numbers of GPUs.
_HOMES = re.compile(r"(/home/|/Users/|/root\b)[^\s:'\",)\]]*")
_SERIALS = re.compile(r"\b(GPU|MIG)-[0-9a-fA-F-]{8,}")


def say_progress(text: str) -> None:
    """Writes a line of progress to stderr if that is a terminal, so that stdout has the report alone."""
    if sys.stderr.isatty():
        sys.stderr.write(f"{text} …\n")


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


@dataclass(frozen=True)
class Private:
    """Texts to hide, each with its replacement. `paths`: folders; `words`: names of the user and of machines."""

    paths: tuple[tuple[str, str], ...]
    words: tuple[tuple[str, str], ...]


def find_private(machines: Mapping[str, str] = MappingProxyType({}), model: str = "") -> Private:
    """Returns the folders and names of this process, of a cluster's `machines` (CLUSTER/MACHINE -> replacement), and of
    the file `model`, if there is one."""
    home, file = str(Path("~").expanduser()), Path(model)
    # If two entries are the same folder, the first name counts.
    named: dict[str, str] = {}
    for path, name in (
        (model, "<model>"),
        (str(file.parent), "<models>"),
        (str(_PACK_ROOT), "<pack>"),
        (sys.prefix, "<python>"),
        (sys.base_prefix, "<python>"),
        (tempfile.gettempdir(), "<tmp>"),
        (os.environ.get("XDG_CACHE_HOME", ""), "<cache>"),
        (home, "~"),
        (str(Path.cwd()), "<here>"),
    ):
        if len(path.rstrip("/")) > 1:
            named.setdefault(path.rstrip("/"), name)
    # The longest path first, because the pack is often below the home folder.
    paths = sorted(named.items(), key=lambda found: -len(found[0]))
    host = socket.gethostname()
    words = {(host, "<host>"), (host.partition(".")[0], "<host>"), (_user(), "<user>")}
    words |= {(file.name, "<model>"), (file.stem, "<model>")}
    for machine, called in machines.items():
        # The two forms used in device names and in error texts. A bare machine name could be any word.
        words |= {(machine, f"<{called}>"), (f"Machine {machine.partition('/')[2]}", f"<{called}>")}
    return Private(tuple(paths), tuple(sorted((w for w in words if w[0]), key=lambda w: -len(w[0]))))


def scrub(text: str, private: Private) -> str:
    """Returns `text` without private paths, names and serial numbers."""
    for path, name in private.paths:
        text = re.sub(rf"{re.escape(path)}(?![\w.-])", name, text)
    text = _SERIALS.sub(r"\1-…", _HOMES.sub("~", text))
    for word, name in private.words:
        text = re.sub(rf"(?<![\w<]){re.escape(word)}(?![\w>])", name, text)
    return text


def scrub_findings(findings: Iterable[Finding], private: Private) -> tuple[Finding, ...]:
    """Returns `findings` with their texts, remedies and details scrubbed."""
    return tuple(
        replace(
            found,
            finding=scrub(found.finding, private),
            remedy=scrub(found.remedy, private),
            details=tuple(scrub(line, private) for line in found.details),
        )
        for found in findings
    )


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without an entry in its password file
        return ""
