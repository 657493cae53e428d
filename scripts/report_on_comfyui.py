#!/usr/bin/env python3
"""Tests the pack on a ComfyUI that it was not proven on, and writes the results: report.md, and logs.

python scripts/report_on_comfyui.py FOLDER --out REPORT [--templates FOLDER] [--without parity]

Parts: the self-test of each class of models, parity with stock nodes in that ComfyUI (tests/comfy), and the graphs of
a template library. The exit status is 1 if a part fails.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from parallel_backend.errors import RankFailed
from parallel_backend.models.proof.installed import digests_in
from parallel_backend.models.proof.states import PROVEN_HERE, is_proven, verdict_of
from parallel_backend.models.tokens.table import TABLE
from parallel_backend.requests import ROWS
from parallel_backend.sidecar.self_test import run_self_tests

ROOT = Path(__file__).resolve().parents[1]
_CLASS = re.compile(r"unet_model\s*=\s*(?:[\w.]+\.)?([A-Z]\w*)")  # in ComfyUI's list of models
# The tests that show most for their time: every family, every node, every sampler, the loop on the devices, VAEs.
PARITY = (
    "test_model_families.py",
    "test_every_node.py",
    "test_model_patches.py",
    "test_parity_samplers.py",
    "test_parallel_sampler.py",
    "test_parallel_vae.py",
)
_LIMIT = 7200  # seconds after which a part counts as hanging
_SHOWN = 40  # last lines that are shown of a part that failed


@dataclass(frozen=True)
class Part:
    """The result of a part. `summary`: a line or a table, in Markdown."""

    name: str
    passed: bool
    summary: str


def self_tests(comfyui: Path) -> Part:
    """Tests each class of the table whose sources the pack was not proven on; names classes that the table lacks."""
    digests = digests_in(comfyui)
    unknown = [name for name, digest in digests.items() if not is_proven(name, digest)]
    try:
        found = run_self_tests(str(comfyui), unknown) if unknown else ()
    except RankFailed as error:
        return Part("Self-tests", False, str(error))
    verdicts = [(test.class_name, verdict_of(test)) for test in found]
    lesser = [(name, one.mode, one.words) for name, one in verdicts if one != PROVEN_HERE]
    lesser += [
        (name, ROWS, "its sources are not where the pack knows them")
        for name in sorted(set(TABLE) - set(digests))
    ]
    named = set(_CLASS.findall((comfyui / "comfy" / "model_base.py").read_text()))
    lines = [
        f"{len(TABLE)} classes of models are described, {len(unknown)} of them in sources that the pack did not know.",
        f"Not described: {', '.join(sorted(named - set(TABLE)))}.",
    ]
    if lesser:
        lines += ["", "| class | runs as | why |", "| --- | --- | --- |"]
        lines += [f"| {' | '.join(row)} |" for row in lesser]
    return Part("Self-tests", not lesser, "\n".join(lines))


def parity(comfyui: Path, out: Path) -> Part:
    tests = [str(ROOT / "tests" / "comfy" / name) for name in PARITY]
    status, text = _run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-n",
            "1",
            "--dist",
            "loadgroup",
            *tests,
        ],
        out / "parity.log",
        COMFYUI_PATH=str(comfyui),
    )
    lines = text.strip().splitlines() or ["nothing was printed"]
    failed = [f"- `{line}`" for line in lines if line.startswith(("FAILED", "ERROR"))]
    return Part("Parity", status == 0, "\n".join([lines[-1], "", *failed]).strip())


def templates(folder: Path, out: Path) -> Part:
    """Judges a template library. A graph that does not run is no failure: it may be newer than what the pack knows."""
    status, text = _run(
        [sys.executable, str(ROOT / "scripts" / "check_templates.py"), str(folder), "--json"],
        out / "templates.log",
    )
    try:
        found = json.loads(text.strip().splitlines()[-1])
    except (IndexError, ValueError):
        return Part("Templates", False, _end_of(text))
    lines = [f"{found['run']} of {found['graphs']} graphs run.", "", "| graph | why not |", "| --- | --- |"]
    lines += [f"| {graph} | {reason} |" for graph, reason in found["not"].items()]
    return Part("Templates", status == 0, "\n".join(lines))


def report(comfyui: Path, parts: Sequence[Part]) -> str:
    failed = ", ".join(part.name for part in parts if not part.passed)
    said = f"These do not hold: {failed}." if failed else "All holds."
    lines = [f"# The pack on ComfyUI {_version(comfyui)}", "", said]
    for part in parts:
        lines += ["", f"## {part.name}", "", part.summary]
    return "\n".join([*lines, ""])


def _version(comfyui: Path) -> str:
    """Returns ComfyUI's release and, if it is a clone, the commit."""
    release = (comfyui / "comfyui_version.py").read_text().rpartition("=")[2].strip(" \n\"'")
    if not (comfyui / ".git").exists():
        return release
    commit = subprocess.run(
        ["git", "-C", str(comfyui), "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=True,
    )
    return f"{release} ({commit.stdout.strip()})"


def _run(command: Sequence[str], log: Path, **environment: str) -> tuple[int, str]:
    """Runs a command; returns (exit status, its standard output). `log` gets its standard error, then its output."""
    with log.open("w") as complaints:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=complaints,
            text=True,
            timeout=_LIMIT,
            check=False,
        )
        complaints.write(done.stdout)
    return done.returncode, done.stdout


def _end_of(text: str) -> str:
    return "\n".join(["```", *text.strip().splitlines()[-_SHOWN:], "```"])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("comfyui", type=Path, help="ComfyUI's folder")
    parser.add_argument("--templates", type=Path, help="the folder of graphs")
    parser.add_argument("--out", type=Path, required=True, help="for the report and its logs")
    parser.add_argument("--without", nargs="*", choices=("self-tests", "parity"), default=())
    arguments = parser.parse_args()
    if not (arguments.comfyui / "comfyui_version.py").is_file():
        parser.error(f"{arguments.comfyui} is no ComfyUI: it has no comfyui_version.py")
    arguments.out.mkdir(parents=True, exist_ok=True)
    comfyui, out = arguments.comfyui.resolve(), arguments.out.resolve()
    parts = []
    if "self-tests" not in arguments.without:
        parts.append(self_tests(comfyui))
    if "parity" not in arguments.without:
        parts.append(parity(comfyui, out))
    if arguments.templates:
        parts.append(templates(arguments.templates.resolve(), out))
    (out / "report.md").write_text(report(comfyui, parts))
    print((out / "report.md").read_text())
    return int(not all(part.passed for part in parts))


if __name__ == "__main__":
    sys.exit(main())
