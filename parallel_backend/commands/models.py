"""`python -m parallel_backend models`: how far this ComfyUI's models can be shared out, and by which proof."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ..machine.self_tests import SelfTestStore
from ..models.proof.installed import VARIABLE, digests_in, find_folder, version_in
from ..models.proof.states import PROVEN_HERE, ClassVerdict, is_proven, verdict_of
from ..models.tokens.table import TABLE, state_of
from ..requests import ATTENTION, ROWS, TOKEN_MODES

_WITH_PACK, _TESTED, _UNTESTED, _MISSING, _UNDESCRIBED = (
    "came with the pack",
    "tested here",
    "not tested yet",
    "not in this ComfyUI",
    "not described",
)
_BY_ROWS = "whole images and prompts are shared out"
_BY_ATTENTION = f"{_BY_ROWS}, and where those are few, the queries of attention"
_CLASS = re.compile(r"unet_model\s*=\s*(?:[\w.]+\.)?([A-Z]\w*)")  # in ComfyUI's list of models
_UNTESTED_WORDS = "is tested on the CPU before it first runs, in 10 to 20 seconds"


@dataclass(frozen=True)
class ModelRow:
    """`state`: one of requests.TOKEN_MODES, empty where it is not known yet; `proof`: whence; `words`: for people."""

    module: str
    state: str
    proof: str
    words: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--comfyui", help=f"its folder; else {VARIABLE}, else the one that this pack is installed in"
    )
    parser.add_argument(
        "--test", action="store_true", help="test what is not tested yet, and keep the outcomes"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")


def run(args: argparse.Namespace) -> int:
    """Prints the table; 1 where a class runs in a lesser way than the pack knows, or not at all. Raises RequestError
    for a folder without a ComfyUI, RankFailed for a test that gave no outcome."""
    root = find_folder(args.comfyui)
    found = rows(root, test=args.test)
    if args.json:
        said = {"comfyui": version_in(root), "models": [asdict(row) for row in found]}
        sys.stdout.write(f"{json.dumps(said)}\n")
    else:
        sys.stdout.write(_table(version_in(root), found))
    return int(
        any(row.words for row in found if row.proof == _TESTED) or any(row.proof == _MISSING for row in found)
    )


def rows(root: Path, *, test: bool) -> list[ModelRow]:
    """Lists each class whose tokens the pack can share out, and then each other class that the ComfyUI in `root` has a
    model of. `test`: those that nobody knows."""
    digests = digests_in(root)
    store = SelfTestStore()
    kept = {name: store.find(name, digest) for name, digest in digests.items() if not is_proven(name, digest)}
    unknown = [name for name, outcome in kept.items() if outcome is None]
    if test and unknown:
        from ..sidecar.self_test import run_self_tests  # late: the other commands run without torch

        for outcome in run_self_tests(str(root), unknown):
            store.keep(digests[outcome.class_name], outcome)
            kept[outcome.class_name] = outcome

    def row(name: str) -> ModelRow:
        if name not in digests:
            return ModelRow(name, ROWS, _MISSING, "its sources are not where the pack knows them")
        if name not in kept:
            return _row(name, PROVEN_HERE, _WITH_PACK)
        outcome = kept[name]
        return ModelRow(name, "", _UNTESTED) if outcome is None else _row(name, verdict_of(outcome), _TESTED)

    others = [
        ModelRow(name, state, _UNDESCRIBED, _BY_ATTENTION if state == ATTENTION else _BY_ROWS)
        for name in _classes(root) - set(TABLE)
        for state in [state_of(name)]
    ]
    return [*(row(name) for name in sorted(TABLE)), *sorted(others, key=lambda one: one.module)]


def _classes(root: Path) -> set[str]:
    """The classes of networks that ComfyUI's models are of, by their names in its sources."""
    try:
        return set(_CLASS.findall((root / "comfy" / "model_base.py").read_text()))
    except OSError:
        return set()


def _row(name: str, verdict: ClassVerdict, proof: str) -> ModelRow:
    return ModelRow(name, max(state_of(name), verdict.mode, key=TOKEN_MODES.index), proof, verdict.words)


def _table(version: str, found: Sequence[ModelRow]) -> str:
    widths = [
        max(len(text) for text in column)
        for column in zip(*((r.module, r.state) for r in found), strict=True)
    ]
    lines = [
        f"ComfyUI {version}: {len(found)} classes of models",
        "stay, block, bands: the tokens or rows of one image are shared out",
        f"attention: {_BY_ATTENTION}",
        f"rows: {_BY_ROWS}",
        "",
    ]
    for row in found:
        words = f" ({row.words})" if row.words and row.proof != _UNDESCRIBED else ""
        lines.append(
            f"{row.module:<{widths[0]}}  {row.state or '?':<{widths[1]}}  {row.proof}{words}".rstrip()
        )
    if any(row.proof == _UNTESTED for row in found):
        lines += ["", f"? {_UNTESTED_WORDS}; --test does so now."]
    lines += [
        "",
        "docs/models.md says more of each, and docs/newer-comfyui.md what is new here.",
    ]
    return "\n".join([*lines, ""])
