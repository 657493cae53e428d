"""The messages of `doctor --gpu` checks, and the main loop of a process that runs such checks one after the other.

The process reads a line of JSON, the CheckSubject, and then one line with each check's name. For each check it writes a
line of JSON (Answer). An exception in a check becomes an answer; the asking process notices any other end.
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

SHOW_STACK = signal.SIGUSR1  # makes a process write its stack to its stderr


@dataclass(frozen=True)
class CheckSubject:
    """The subject of the checks. `devices`: one per rank; `model`: path of its file; `is_demo`: True if that is the
    pack's demo model; `pixels`: side of the square picture; `odd_pixels`: height and width of one whose latent has odd
    sides; `text`: tokens of a prompt; `steps`: of a job; `attention_tokens`: tokens for checks of attention alone;
    `pipe_limit_s`: seconds that PipeFusion may take for a job."""

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
    """The outcome of one check in one process. `raised`: True if the check raised an error, which is the last finding;
    then the process and its CUDA context must not be used again."""

    findings: tuple[Finding, ...]
    raised: bool = False


Run = Callable[[], Sequence[Finding]]
# (subject, rank, path of the ranks' rendezvous) -> the checks by name.
MakeChecks = Callable[[CheckSubject, int, str], Mapping[str, Run]]


def serve(make: MakeChecks) -> None:
    """Runs checks until stdin ends: the main function of a check process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--parent", type=int, required=True, help="process id, with which this ends")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--rendezvous", default="", help="file at which the processes meet")
    arguments = parser.parse_args()
    die_with_parent(arguments.parent)
    faulthandler.enable()
    faulthandler.register(SHOW_STACK, all_threads=False)
    # What libraries print must not mix with the answers.
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
