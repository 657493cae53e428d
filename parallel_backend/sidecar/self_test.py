"""Runs self-tests of ComfyUI's module classes on a rank that does nothing else (rank/checks/module_parity.py)."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ..errors import Cancelled, ParallelError, RankFailed
from ..requests import ComfyUISource
from ..wire import deadlines
from ..wire.checks.findings import SelfTest
from ..wire.protocol import NO_REQUEST, ProveClasses
from .group.exchange import Exchange, reports
from .group.group import join_ranks
from .group.lease import ShouldCancel
from .group.supervisor import RANK_MODULE, get_supervisor


def run_self_tests(
    root: str,
    class_names: Sequence[str],
    *,
    should_cancel: ShouldCancel | None = None,
    rank_module: str = RANK_MODULE,
) -> tuple[SelfTest, ...]:
    """Returns the outcome for each of these classes in the ComfyUI in folder `root`. Blocks.

    Raises Cancelled, or RankFailed if the rank crashed, took too long or gave no outcome: that proves nothing about the
    classes. The rank belongs to no sidecar, so listeners do not hear of it.
    """
    limit = deadlines.START + deadlines.SELF_TEST * len(class_names)
    ends = time.monotonic() + limit

    def cancelled() -> bool:
        if time.monotonic() > ends:
            raise RankFailed(0, f"it did not end within {limit:.0f} s", reason="hang")
        return should_cancel is not None and should_cancel()

    group = get_supervisor().spawn(("cpu:0",), rank_module)
    try:
        join_ranks(group, cancelled)
        # NO_REQUEST: it has no step boundary, so a cancel kills the rank at once.
        exchange = Exchange(group, NO_REQUEST, cancelled, frozenset())
        exchange.send(ProveClasses(ComfyUISource(root), tuple(class_names)))
        (found,) = reports(exchange.wait(lambda: limit), lambda answer: answer.proofs)
        return found
    except Cancelled:
        raise
    except ParallelError as error:
        cause, reason = (
            (error.cause, error.reason) if isinstance(error, RankFailed) else (str(error), "error")
        )
        raise RankFailed(0, f"the self-test failed: {cause}", crashed=True, reason=reason) from None
    finally:
        get_supervisor().kill(group)
        group.close()
