"""Removes the names of people and machines from a report, so that it can be pasted into a bug report."""

from __future__ import annotations

import getpass
import os
import re
import socket
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from ...wire.checks.findings import Finding

_PACK_ROOT = Path(__file__).resolve().parents[3]
# Paths below any home folder, and serial numbers of GPUs.
_HOMES = re.compile(r"(/home/|/Users/|/root\b)[^\s:'\",)\]]*")
_SERIALS = re.compile(r"\b(GPU|MIG)-[0-9a-fA-F-]{8,}")


@dataclass(frozen=True)
class Private:
    """Texts to hide, each with its replacement. `paths`: folders; `words`: names of the user and of machines."""

    paths: tuple[tuple[str, str], ...]
    words: tuple[tuple[str, str], ...]


def find_private(machines: Mapping[str, str] = MappingProxyType({})) -> Private:
    """Returns the folders and names of this process, and of a cluster's `machines`: CLUSTER/MACHINE -> replacement."""
    home = str(Path("~").expanduser())
    # If two entries are the same folder, the first name counts.
    named: dict[str, str] = {}
    for path, name in (
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
