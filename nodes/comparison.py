"""One job on one device and on all, in numbers and in words: both times, the speed-up, the largest difference."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import mean

from .report import typical


@dataclass(frozen=True)
class Side:
    """A run of the job. `title`: its strategy in words; `step_seconds`: of each step, or model call; `skipped`: whether
    a step cache answered some of them."""

    title: str
    step_seconds: tuple[float, ...]
    exact: bool
    skipped: bool = False

    @property
    def seconds(self) -> float:
        """In all, loading left out."""
        return sum(self.step_seconds)

    def step(self, *, on_average: bool) -> float:
        """Seconds of a step; the first one, which pays for what is done once, left out where there are others."""
        return mean(self.step_seconds[1:] or self.step_seconds) if on_average else typical(self.step_seconds)


@dataclass(frozen=True)
class Comparison:
    """`levels`: the largest difference of a pixel, of 255; `latent`: the largest of the latents, `latent_peak` the
    largest value of one device's. `unit`: what the seconds are of, step or model call."""

    one: Side
    split: Side
    unit: str
    levels: int
    latent: float
    latent_peak: float

    @property
    def speed_up(self) -> float:
        """How many times as fast a step is; on average where a step cache answered some."""
        one, split = (side.step(on_average=self.split.skipped) for side in (self.one, self.split))
        return one / split

    def headline(self) -> str:
        """E.g. `Ulysses 2 · 1.8 × one device · 5.43 s instead of 9.81 s · largest difference 0 of 255`."""
        return " · ".join(
            (
                self.split.title,
                f"{self.speed_up:.2g} × one device",
                f"{self.split.seconds:.3g} s instead of {self.one.seconds:.3g} s",
                f"largest difference {self.levels} of 255",
            )
        )

    def lines(self) -> list[str]:
        """One fact each."""
        kind = "exact" if self.split.exact else "approximate"
        lines = [self._line(self.one), self._line(self.split)]
        lines.append(f"speed-up: {self.speed_up:.2f} × one device")
        if self.speed_up < 1:
            lines.append("note: splitting this job costs more than it gains; one device is the faster")
        lines.append(f"largest difference: {self.levels} of 255 in the pictures ({kind})")
        relative = self.latent / self.latent_peak if self.latent_peak else 0.0
        lines.append(
            f"of the latents: {self.latent:.2g}, which is {relative:.2g} of one device's largest value"
        )
        return lines

    def _line(self, side: Side) -> str:
        average = self.split.skipped
        count = len(side.step_seconds)
        units = self.unit if count == 1 else f"{self.unit}s"
        middle = "mean" if average else "median"
        return f"{side.title}: {count} {units} in {side.seconds:.3f} s, {middle} {side.step(on_average=average):.4f} s"

    def as_dict(self) -> dict[str, object]:
        """For the page; one device first."""
        return {
            "headline": self.headline(),
            "titles": [self.one.title, self.split.title],
            "seconds": [self.one.seconds, self.split.seconds],
            "speed_up": self.speed_up,
            "levels": self.levels,
            "exact": self.split.exact,
        }
