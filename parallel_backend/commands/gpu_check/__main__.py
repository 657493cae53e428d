"""`python -m parallel_backend.commands.gpu_check`: the process that runs checks which start ranks; see processes.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from ...wire.checks.findings import Finding
from ...wire.checks.gpu_check import CheckSubject, Run, serve


def make_checks(subject: CheckSubject, rank: int, rendezvous: str) -> Mapping[str, Run]:
    from .checks import Examine
    from .ranks import Ranks
    from .run import choose

    ranks = Ranks(subject)

    def run(examine: Examine) -> Sequence[Finding]:
        return tuple(examine(ranks))

    return {check.name: partial(run, check.examine) for _, check in choose(()) if check.examine is not None}


if __name__ == "__main__":
    serve(make_checks)
