"""The boundary between two steps while the host is a step ahead of its device, as on a GPU."""

from __future__ import annotations

import pytest
import torch

from loop_ranks import ParentOfRankZero
from parallel_backend.errors import Cancelled, RequestError
from parallel_backend.job.payload import pack_step
from parallel_backend.rank.outcome.progress import RequestLink
from parallel_backend.rank.work import step_boundary
from parallel_backend.rank.work.step_boundary import StepBoundary
from parallel_backend.sampling.host_copy import NumbersCheck, most_lag
from parallel_backend.wire.transport import LinkFull
from ranks import run_ranks

STEPS = 6


def boundary(link, lag, world=None, previews=False):
    return StepBoundary(
        RequestLink(link, epoch=0, request=0, rank=0 if world is None else world.rank),
        control=None if world is None else world.control,
        device=torch.device("cpu"),
        steps=STEPS,
        previews=previews,
        lag=lag,
    )


def run_steps(on_step):
    """Returns (number of started steps, the message of the cancel or an empty string)."""
    begun = 0
    try:
        for i in range(STEPS):
            begun += 1
            on_step(i, torch.zeros(1))
        on_step.finish()
    except Cancelled as error:
        return begun, str(error)
    return begun, ""


ALWAYS, NEVER = float("inf"), -1.0
# (lag, LONGEST_LAG, step of the cancel, number of started steps)
CANCELS = (
    (0, ALWAYS, 4, 4),
    (1, ALWAYS, 4, 5),
    (1, NEVER, 4, 4),  # steps so long that a cancel must not wait for another
    (1, ALWAYS, 1, 1),  # nor after the first step, which may compile
    (1, ALWAYS, STEPS, STEPS),
    (1, ALWAYS, 0, STEPS),
)


def on_ranks(world):
    """Returns for each of CANCELS (number of started steps, message of the cancel, the steps that were reported)."""
    found = []
    for lag, longest, cancel_at, _ in CANCELS:
        step_boundary.LONGEST_LAG = longest
        link = ParentOfRankZero(cancel_at)
        found.append((*run_steps(boundary(link, lag, world)), link.steps))
    return found


def test_all_ranks_stop_at_the_same_step_at_most_one_late():
    for rank, of_rank in enumerate(run_ranks(on_ranks, 2)):
        for (_, _, cancel_at, expected), (begun, said, sent) in zip(CANCELS, of_rank, strict=True):
            assert begun == expected
            assert said == (
                "" if not cancel_at else f"The request was cancelled after step {cancel_at} of {STEPS}."
            )
            # Each step is reported once and in order, up to the last that counts.
            assert sent == ([] if rank else list(range(1, (cancel_at or STEPS) + 1)))


def test_the_host_waits_for_no_step_that_it_has_just_given_to_the_device(monkeypatch):
    given, waited = [], []

    class Moment(step_boundary._Moment):
        def __init__(self, device):
            super().__init__(device)
            given.append(self)

        def wait(self):
            waited.append((given.index(self), len(given) - 1))

    monkeypatch.setattr(step_boundary, "_Moment", Moment)
    monkeypatch.setattr(step_boundary, "LONGEST_LAG", ALWAYS)
    on_step = boundary(ParentOfRankZero(), 1)
    run_steps(on_step)
    # (step that the host waited for, newest step submitted to the device); from step 3 on, steps are known to be short
    assert waited == [(1, 1), (2, 2), (3, 4), (4, 5), (5, 6), (6, 6)]
    assert len(on_step.seconds) == STEPS


def test_a_gpu_is_given_a_step_ahead_and_a_cpu_none():
    assert (most_lag(torch.device("cuda", 1)), most_lag(torch.device("cpu"))) == (1, 0)


@pytest.mark.parametrize(("lag", "steps"), [(0, 2), (1, 3)])
def test_numbers_that_are_none_are_told_of_at_most_a_step_late(lag, steps):
    check, seen = NumbersCheck(lag), 0
    with pytest.raises(RequestError, match="in step 2"):
        for step in range(1, STEPS):
            seen += 1
            check(torch.full((2,), float("nan") if step == 2 else 0.0), f"in step {step}")
    assert seen == steps
    last = NumbersCheck(lag)
    with pytest.raises(RequestError, match="in the only one"):
        last(torch.tensor([float("inf")]), "in the only one")
        last.finish()


class FullLink(ParentOfRankZero):
    """A link that is full the first two times that something is sent over it."""

    def __init__(self) -> None:
        super().__init__()
        self.tries = 0

    def send(self, envelope, descriptors=()) -> None:
        self.tries += 1
        if self.tries <= 2:
            raise LinkFull
        super().send(envelope, descriptors)


def test_a_full_link_loses_previews_but_no_latents_for_a_nodes_callback():
    link = FullLink()
    on_step = boundary(link, 0, previews=True)
    on_step(0, torch.zeros(1))
    on_step.progress.beside = pack_step(1, torch.zeros(1), torch.ones(1), STEPS)
    on_step(1, torch.zeros(1))
    assert (link.tries, link.steps) == (3, [2])
