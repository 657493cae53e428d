"""`python -m parallel_backend.commands.gpu_check`: the process that runs checks which start ranks; see processes.py."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from ...wire.checks.gpu_check import CheckSubject, Run, serve


def make_checks(subject: CheckSubject, rank: int, rendezvous: str) -> Mapping[str, Run]:
    from .ranks import Ranks
    from .run import choose

    ranks = Ranks(subject)
    return {check.name: partial(check.examine, ranks) for _, check in choose(()) if check.examine is not None}


if __name__ == "__main__":
    serve(make_checks)
