"""The trials of `auto` within a job: the strategy of each step until the fastest one is known. Pure functions.

All exact strategies give the same latent, so a job's own steps tell which is the fastest: a few under the first
strategy, a few under each other one, and the rest under the winner. Rank 0 decides from its own times and tells the
others (rank/work/switching.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from .strategy import ParallelStrategy

MAX_TRIALS = 3  # strategies that a job tries beside its first one
FIRST_COUNTED, TRIAL_COUNTED = 3, 2  # steps that are timed, after one that warms up
BEHIND = 1.15  # this many times as slow as the fastest so far, a strategy is given up after one timed step,
FAR_BEHIND = 1.5  # and this many times (beside what the change may cost) after the step that warms up
GAIN = 1.02  # a strategy must be this many times as fast as the first one to take its place
MOST_STEPS = 1 + TRIAL_COUNTED  # of one of them, before the next
LONGEST = 1 + FIRST_COUNTED + MAX_TRIALS * MOST_STEPS  # steps until all is settled
# A trial takes three steps at most, and begins only where three times as many are left.
STEPS_LEFT = 9
BUDGET = 0.03  # share of a job's time that its trials may lose against the fastest strategy known
# Seconds by which the first step under a strategy may exceed the next ones. On a CPU groups stand at once, on GPUs
# communicators are made, and compiled blocks are compiled anew for each new number of tokens. No trial begins unless
# that is less than SHARE of the time that is left.
SWITCH_CPU, SWITCH_GPU, SWITCH_COMPILED = 0.0, 0.5, 20.0
SHARE = 0.1


@dataclass(frozen=True)
class TrialCandidate:
    """A strategy to try. `slower`: its step as a multiple of the first strategy's, by arithmetic alone; `at_least_s`: a
    lower bound of it in seconds, 0 where nobody knows one; `switch_s`: by how much its first step may exceed the next
    ones."""

    strategy: ParallelStrategy
    slower: float = 1.0
    at_least_s: float = 0.0
    switch_s: float = 0.0


@dataclass(frozen=True)
class TrialPlan:
    """What a job tries beside its first strategy, in this order. `budget`: steps that the trials may lose in all."""

    candidates: tuple[TrialCandidate, ...] = ()
    budget: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.candidates)

    @property
    def strategies(self) -> tuple[ParallelStrategy, ...]:
        return tuple(other.strategy for other in self.candidates)


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
        self._candidates = (TrialCandidate(first), *plan.candidates[:MAX_TRIALS])
        self.current = 0
        self.is_settled = len(self._candidates) == 1 or steps - 1 - FIRST_COUNTED < STEPS_LEFT
        self._budget = plan.budget
        self._left = steps
        self._age = 0  # steps since the last change
        self._seconds: dict[int, list[float]] = {}
        self._warmup: dict[int, float] = {}  # s of the first step under each

    @property
    def strategy(self) -> ParallelStrategy:
        return self._candidates[self.current].strategy

    @property
    def results(self) -> tuple[Trial, ...]:
        """Of the strategies that were begun, in order; none where nothing else than the first one was."""
        if len(self._seconds) < 2:
            return ()
        return tuple(Trial(self._candidates[i].strategy, tuple(seen)) for i, seen in self._seconds.items())

    def took(self, seconds: float) -> None:
        """The step under `current` took so long; decides what the next one runs under."""
        self._left -= 1
        self._age += 1
        self._warmup.setdefault(self.current, seconds)
        seen = self._seconds.setdefault(self.current, [])
        if self._age > 1:
            seen.append(seconds)
        if self.is_settled or not self._knows_enough(seen):
            return
        following = next((i for i in range(self.current + 1, len(self._candidates)) if self._pays(i)), None)
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

    @property
    def _lost(self) -> float:
        """Seconds that the trials so far took beyond as many usual steps of the fastest strategy."""
        usual = min((median(seen) for seen in self._seconds.values() if seen), default=0.0)
        tried = [[self._warmup[i], *seen] for i, seen in self._seconds.items() if i]
        return sum(max(0.0, sum(steps) - len(steps) * usual) for steps in tried)

    def _knows_enough(self, seen: list[float]) -> bool:
        if self.current == 0:
            return len(seen) >= FIRST_COUNTED
        time = min(seen) if seen else self._warmup[self.current] - self._candidates[self.current].switch_s
        if time > self._best and self._lost + time - self._best > self._budget * self._best:
            return True
        return len(seen) >= TRIAL_COUNTED or time > (BEHIND if seen else FAR_BEHIND) * self._best

    def _pays(self, number: int) -> bool:
        """Whether the job can win back a trial of this strategy, which may yet be the fastest, within the budget."""
        other, best = self._candidates[number], self._best
        if self._left < STEPS_LEFT or other.switch_s > SHARE * self._left * best:
            return False
        slower = other.slower / self._candidates[self._fastest()].slower
        steps = 1 if slower > FAR_BEHIND else 2 if slower > BEHIND else MOST_STEPS
        costs = steps * max(0.0, slower - 1.0) * best
        return other.at_least_s * GAIN < best and self._lost + costs <= self._budget * best

    def _fastest(self) -> int:
        timed = {i: min(seen) for i, seen in self._seconds.items() if seen}
        best = min(timed, key=timed.__getitem__, default=0)
        return best if 0 in timed and timed[best] * GAIN < timed[0] else 0

    def _change_to(self, number: int) -> None:
        if number != self.current:
            self.current, self._age = number, 0


def switch_seconds(*, on_cpu: bool, compiles: bool) -> float:
    """TrialCandidate.switch_s of ranks on a CPU or on GPUs."""
    return SWITCH_COMPILED if compiles else SWITCH_CPU if on_cpu else SWITCH_GPU
