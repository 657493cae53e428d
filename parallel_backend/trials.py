"""The trials of `auto` within a job: the strategy of each step until the fastest one is known. Pure functions.

All exact strategies give the same latent, so a job's own steps tell which is the fastest: a few under the first
strategy, a few under each other one, and the rest under the winner. One process decides from its own times and tells
the others: rank 0 for a loop on the ranks (rank/switching.py), ComfyUI's for a loop of its own (nodes/model/plans.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from .strategy import ParallelStrategy

MOST_OTHERS = 3  # strategies that a job tries beside its first one
FIRST_COUNTED, OTHERS_COUNTED = 3, 2  # steps that are timed, after one that warms up
BEHIND = 1.15  # this many times as slow as the fastest so far, a strategy is given up after one timed step,
FAR_BEHIND = 2.0  # and this many times (beside what the change may cost) after the step that warms up
GAIN = 1.02  # a strategy must be this many times as fast as the first one to take its place
LONGEST = 1 + FIRST_COUNTED + MOST_OTHERS * (1 + OTHERS_COUNTED)  # steps until all is settled
# A trial takes three steps at most, and begins only where three times as many are left.
STEPS_LEFT = 9
# Seconds by which the first step under a strategy may exceed the next ones. On a CPU groups stand at once, on GPUs
# communicators are made, and compiled blocks are compiled anew for each new number of tokens. No trial begins unless
# that is less than SHARE of the time that is left.
SWITCH_CPU, SWITCH_GPU, SWITCH_COMPILED = 0.0, 0.5, 20.0
SHARE = 0.1


@dataclass(frozen=True)
class TrialPlan:
    """The strategies that a job tries beside its first one, the most promising first.

    `at_least_s`: for each of them a lower bound of its step in seconds, 0 where nobody knows one; `switch_s`: by how
    much the first step under another strategy may exceed the next ones.
    """

    others: tuple[ParallelStrategy, ...] = ()
    at_least_s: tuple[float, ...] = ()
    switch_s: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.others)


NO_TRIALS = TrialPlan()


@dataclass(frozen=True)
class Trial:
    """What a job saw of one strategy. `seconds`: of its timed steps, in order; none where it was given up before."""

    strategy: ParallelStrategy
    seconds: tuple[float, ...] = ()


class TrialRun:
    """The trials of one job of so many steps. `current`: the number of the strategy that the next step runs under, 0
    for the first one; `is_settled`: the rest of the job runs under it."""

    def __init__(self, first: ParallelStrategy, plan: TrialPlan, steps: int) -> None:
        self.strategies = (first, *plan.others[:MOST_OTHERS])
        self.current = 0
        self.is_settled = len(self.strategies) == 1 or steps - 1 - FIRST_COUNTED < STEPS_LEFT
        self._plan = plan
        self._left = steps
        self._age = 0  # steps since the last change
        self._seconds: dict[int, list[float]] = {}

    @property
    def strategy(self) -> ParallelStrategy:
        return self.strategies[self.current]

    @property
    def results(self) -> tuple[Trial, ...]:
        """Of the strategies that were begun, in order; none where nothing else than the first one was."""
        if len(self._seconds) < 2:
            return ()
        return tuple(Trial(self.strategies[i], tuple(seen)) for i, seen in self._seconds.items())

    def took(self, seconds: float) -> None:
        """The step under `current` took so long; decides what the next one runs under."""
        self._left -= 1
        self._age += 1
        seen = self._seconds.setdefault(self.current, [])
        if self._age > 1:
            seen.append(seconds)
        if self.is_settled or not self._knows_enough(seconds, seen):
            return
        following = next(
            (i for i in range(self.current + 1, len(self.strategies)) if self._promises(i)), None
        )
        if following is None:
            self.settle()
        else:
            self._change_to(following)

    def follow(self, current: int, is_settled: bool) -> None:
        """Another process decided so."""
        self._change_to(current)
        self.is_settled = is_settled

    def settle(self) -> None:
        """The rest runs under the strategy that is the fastest as far as is known."""
        self._change_to(self._fastest())
        self.is_settled = True

    @property
    def _best(self) -> float:
        """The least time so far, which a busy machine disturbs the least."""
        return min((min(seen) for seen in self._seconds.values() if seen), default=0.0)

    def _knows_enough(self, seconds: float, seen: list[float]) -> bool:
        if self.current == 0:
            return len(seen) >= FIRST_COUNTED
        if not seen:
            return seconds > FAR_BEHIND * self._best + self._plan.switch_s
        return len(seen) >= OTHERS_COUNTED or seconds > BEHIND * self._best

    def _promises(self, number: int) -> bool:
        """Whether the job is long enough to win back a trial of this strategy, which may yet be the fastest."""
        if self._left < STEPS_LEFT or self._plan.switch_s > SHARE * self._left * self._best:
            return False
        return self._plan.at_least_s[number - 1] * GAIN < self._best

    def _fastest(self) -> int:
        timed = {i: min(seen) for i, seen in self._seconds.items() if seen}
        best = min(timed, key=timed.__getitem__, default=0)
        return best if 0 in timed and timed[best] * GAIN < timed[0] else 0

    def _change_to(self, number: int) -> None:
        if number != self.current:
            self.current, self._age = number, 0


def switch_seconds(*, on_cpu: bool, compiles: bool) -> float:
    """TrialPlan.switch_s of ranks on a CPU or on GPUs."""
    return SWITCH_COMPILED if compiles else SWITCH_CPU if on_cpu else SWITCH_GPU
