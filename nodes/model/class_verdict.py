"""The verdict on a model class of the user's ComfyUI: from a proof in the pack, an earlier test, or a new one."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from ...parallel_backend.errors import RankFailed
from ...parallel_backend.machine.self_tests import SelfTestStore
from ...parallel_backend.models.proof.states import (
    PROVEN_HERE,
    UNKNOWN,
    ClassVerdict,
    entry_digest,
    is_proven,
    untested,
    verdict_of,
)
from ...parallel_backend.models.tokens.table import TABLE
from ...parallel_backend.sidecar.group.lease import ShouldCancel
from ...parallel_backend.sidecar.self_test import run_self_tests

_DURATION = "10 to 20 seconds, once"  # mostly the imports of torch and ComfyUI

log = logging.getLogger(__name__)
_one_at_a_time = threading.Lock()
# Verdicts of this process, by class and digest: also those that are not on disk, such as that of a failed test.
_session: dict[tuple[str, str], ClassVerdict] = {}


def ensure_verdict(
    root: str,
    class_name: str,
    on_phase: Callable[[str], None] | None = None,
    should_cancel: ShouldCancel | None = None,
) -> ClassVerdict:
    """Returns how far tokens of this class may be split in the ComfyUI in folder `root`. Tests it if that is unknown.

    Raises Cancelled if the test is cancelled; the next call tests it again.
    """
    if class_name not in TABLE:
        return UNKNOWN
    try:
        digest = entry_digest(root, class_name)
    except (OSError, SyntaxError, ValueError) as error:
        log.warning("parallel sampling: the sources of %s cannot be read: %s", class_name, error)
        return untested(class_name, f"its sources cannot be read: {error}")
    if found := _without_test(class_name, digest):
        return found
    with _one_at_a_time:
        if (class_name, digest) not in _session:
            if on_phase is not None:
                on_phase(f"testing how this version of ComfyUI computes {class_name} ({_DURATION})")
            _session[class_name, digest] = _test(root, class_name, digest, should_cancel)
        return _session[class_name, digest]


def known_verdict(root: str, class_name: str) -> ClassVerdict:
    """Returns the verdict without running a test. If only a test could tell, trusts the table, so that nothing is ruled
    out that may run."""
    if class_name not in TABLE:
        return UNKNOWN
    try:
        return _without_test(class_name, entry_digest(root, class_name)) or PROVEN_HERE
    except (OSError, SyntaxError, ValueError):
        return PROVEN_HERE


def _without_test(class_name: str, digest: str) -> ClassVerdict | None:
    """Returns the verdict of a proof or an earlier test; None if there is none."""
    if is_proven(class_name, digest):
        return PROVEN_HERE
    stored = None if (class_name, digest) in _session else SelfTestStore().find(class_name, digest)
    return _session.get((class_name, digest)) if stored is None else verdict_of(stored)


def _test(root: str, class_name: str, digest: str, should_cancel: ShouldCancel | None) -> ClassVerdict:
    try:
        (found,) = run_self_tests(root, (class_name,), should_cancel=should_cancel)
    except RankFailed as error:
        log.warning("parallel sampling: %s is not tested: %s", class_name, error)
        return untested(class_name, error.summary)
    verdict = verdict_of(found)
    if verdict.words:
        log.warning("parallel sampling: %s (off by %.1g) %s", verdict.words, found.worst, found.error)
    SelfTestStore().keep(digest, found)
    return verdict
