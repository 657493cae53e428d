#!/usr/bin/env python3
"""Tests every class of the table on the local ComfyUI, and records the sources of those that pass (proven.json).

A class that fails is named and its sources are not recorded; the exit status is then 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from comfyui_source import comfyui_version, find_comfyui
from parallel_backend.models.proof.states import PROVEN, PROVEN_HERE, entry_digest, verdict_of
from parallel_backend.models.tokens.table import TABLE
from parallel_backend.sidecar.self_test import run_self_tests
from steps import SetupError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("comfyui", nargs="?", help="ComfyUI's folder; else as scripts/test finds it")
    parser.add_argument(
        "--only",
        action="store_true",
        help="forget the sources of other versions, whose proofs are of an older table",
    )
    arguments = parser.parse_args()
    root = find_comfyui(arguments.comfyui)
    if root is None:
        raise SetupError("no ComfyUI found: name its folder, or set COMFYUI_PATH")
    found = run_self_tests(str(root), sorted(TABLE))
    proven: dict[str, set[str]] = {} if arguments.only else _written()
    for test in found:
        print(f"{test.class_name}: {test.mode}, off by {test.worst:.1e} {test.error}".rstrip())
        if verdict_of(test) == PROVEN_HERE:
            proven.setdefault(test.class_name, set()).add(entry_digest(str(root), test.class_name))
    text = json.dumps({name: sorted(proven[name]) for name in sorted(proven)}, indent=2)
    PROVEN.write_text(f"{text}\n")
    print(f"{PROVEN.name}: {sum(map(len, proven.values()))} proofs, with ComfyUI {comfyui_version(root)}")
    return int(any(verdict_of(test) != PROVEN_HERE for test in found))


def _written() -> dict[str, set[str]]:
    return {name: set(digests) for name, digests in json.loads(PROVEN.read_text()).items()}


if __name__ == "__main__":
    sys.exit(main())
