"""The question and the answer of a check of `doctor --gpu`, and the loop of a process that runs such checks in turn.

One line of JSON goes in, the Subject; then a line with a check's name, and a line of JSON (Answer) comes out for each.
Whatever a check raises is an answer; whatever else ends it, the process that asked sees.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..parent_death import die_with_parent
from ..strict_json import from_json, parse, to_json
from .findings import Finding, failed

SHOW_STACK = signal.SIGUSR1  # has a process write where it is to its stderr


@dataclass(frozen=True)
class CheckSubject:
    """What the checks run on. `devices`: one per rank; `model`: path of its file; `is_demo`: it is the pack's own;
    `pixels`: side of the square picture; `odd_pixels`: height and width of one whose latent has odd sides; `text`:
    tokens of a prompt; `steps`: of a job; `attention_tokens`: of attention alone; `pipe_limit_s`: seconds that
    PipeFusion may take for a job."""

    devices: tuple[str, ...]
    model: str
    is_demo: bool
    pixels: int
    odd_pixels: tuple[int, ...]
    text: int
    steps: int
    attention_tokens: int
    pipe_limit_s: float = 60.0

    @property
    def on_gpus(self) -> bool:
        return all(device.startswith("cuda") for device in self.devices)


@dataclass(frozen=True)
class Answer:
    """What one process found in one check. `raised`: the check ended with an error, which is the last finding; after
    one the process, and its CUDA context, are not to be trusted."""

    findings: tuple[Finding, ...]
    raised: bool = False


Run = Callable[[], Sequence[Finding]]
# (subject, rank, path at which the ranks meet) -> the checks by name.
MakeChecks = Callable[[CheckSubject, int, str], Mapping[str, Run]]


def serve(make: MakeChecks) -> None:
    """The life of a process that runs checks, until its stdin ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--parent", type=int, required=True, help="process id, with which this ends")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--rendezvous", default="", help="file at which the processes meet")
    arguments = parser.parse_args()
    die_with_parent(arguments.parent)
    faulthandler.enable()
    faulthandler.register(SHOW_STACK)
    # What libraries print goes beside the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    subject = from_json(parse(sys.stdin.readline()), CheckSubject, "the subject")
    checks: Mapping[str, Run] = {}
    for line in sys.stdin:
        try:
            checks = checks or make(subject, arguments.rank, arguments.rendezvous)
            answer = Answer(tuple(checks[line.strip()]()))
        except Exception as error:
            answer = Answer((failed(error),), raised=True)
        print(json.dumps(to_json(answer), allow_nan=False), file=answers, flush=True)
