"""The trials of `auto` in a job: picks each step's strategy until the fastest one is known. Pure functions.

All exact strategies give the same latent, so a job's own steps tell which is the fastest: a few under the first
strategy, a few under each other one, and the rest under the winner. Rank 0 decides from its own times and tells the
others (rank/work/switching.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from .strategy import ParallelStrategy

MAX_TRIALS = 3  # strategies that a job tries besides its first one
FIRST_COUNTED, TRIAL_COUNTED = 3, 2  # timed steps of the first and of the others, after a warm-up step
BEHIND = 1.15  # a strategy this many times as slow as the fastest so far is dropped after one timed step
FAR_BEHIND = 1.5  # this many times as slow, without the cost of the change: dropped after the warm-up step
GAIN = 1.02  # a strategy must be this many times as fast as the first one to replace it
MOST_STEPS = 1 + TRIAL_COUNTED  # steps of one trial
LONGEST = 1 + FIRST_COUNTED + MAX_TRIALS * MOST_STEPS  # steps until all trials have ended
# A trial takes at most three steps, and starts only if three times as many are left.
STEPS_LEFT = 9
BUDGET = 0.03  # share of a job's time that its trials may lose against the fastest known strategy
# Seconds by which the first step under a strategy may exceed the next ones. On a CPU, groups exist at once. On GPUs,
# communicators are created. Compiled blocks are compiled again for each new number of tokens. A trial starts only if
# this is less than SHARE of the remaining time.
SWITCH_CPU, SWITCH_GPU, SWITCH_COMPILED = 0.0, 0.5, 20.0
SHARE = 0.1


@dataclass(frozen=True)
class TrialCandidate:
    """A strategy to try. `slower`: the estimated time of its step as a multiple of the first strategy's; `at_least_s`:
    a lower bound of its step time in seconds, 0 if unknown; `switch_s`: seconds by which its first step may exceed the
    next ones."""

    strategy: ParallelStrategy
    slower: float = 1.0
    at_least_s: float = 0.0
    switch_s: float = 0.0


@dataclass(frozen=True)
class TrialPlan:
    """The strategies that a job tries besides its first one, in order. `budget`: steps that all trials may lose."""

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
    """The measurements of one strategy. `seconds`: its timed steps, in order; empty if it was dropped before one."""

    strategy: ParallelStrategy
    seconds: tuple[float, ...] = ()


class TrialRun:
    """The trials of one job of `steps` steps. `current`: index of the strategy of the next step, 0 for the first one;
    `is_settled`: True if the rest of the job runs under it."""

    def __init__(self, first: ParallelStrategy, plan: TrialPlan, steps: int) -> None:
        self._candidates = (TrialCandidate(first), *plan.candidates[:MAX_TRIALS])
        self.current = 0
        self.is_settled = len(self._candidates) == 1 or steps - 1 - FIRST_COUNTED < STEPS_LEFT
        self._budget = plan.budget
        self._left = steps
        self._age = 0  # steps since the last change of strategy
        self._seconds: dict[int, list[float]] = {}
        self._warmup: dict[int, float] = {}  # seconds of the first step under each

    @property
    def strategy(self) -> ParallelStrategy:
        return self._candidates[self.current].strategy

    @property
    def results(self) -> tuple[Trial, ...]:
        """The trial of each strategy that was started, in order; empty if only the first one ran."""
        if len(self._seconds) < 2:
            return ()
        return tuple(Trial(self._candidates[i].strategy, tuple(seen)) for i, seen in self._seconds.items())

    def took(self, seconds: float) -> None:
        """Records the time of a step under `current` and chooses the strategy of the next step."""
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
        """Adopts the decision of another process."""
        self._change_to(current)
        self.is_settled = is_settled

    def settle(self) -> None:
        """Runs the rest of the job under the fastest known strategy."""
        self._change_to(self._fastest())
        self.is_settled = True

    @property
    def _best(self) -> float:
        """The least step time so far: it is the least disturbed by other load."""
        return min((min(seen) for seen in self._seconds.values() if seen), default=0.0)

    @property
    def _lost(self) -> float:
        """Seconds lost to the trials so far, compared with the same number of steps of the fastest strategy."""
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
        """Returns True if the strategy may be the fastest and the job can win back its trial within the budget."""
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
    """Returns TrialCandidate.switch_s for ranks on a CPU or on GPUs."""
    return SWITCH_COMPILED if compiles else SWITCH_CPU if on_cpu else SWITCH_GPU
