"""Compares one job on one device and on all, in numbers and in words: both times, the gain, the largest difference."""

from __future__ import annotations

from dataclasses import dataclass

from .speed import as_shown, average, compare_with_one_device, typical


@dataclass(frozen=True)
class Side:
    """A run of the job. `title`: its strategy in words; `step_seconds`: seconds of each step, or model call; `skipped`:
    True if a step cache answered some of them."""

    title: str
    step_seconds: tuple[float, ...]
    exact: bool
    skipped: bool = False

    @property
    def seconds(self) -> float:
        """The seconds of all steps, without loading."""
        return sum(self.step_seconds)

    def step(self, *, on_average: bool) -> float:
        """Returns the median or mean seconds of a step. Without the first one (one-time costs) if there are others."""
        return average(self.step_seconds) if on_average else typical(self.step_seconds)


@dataclass(frozen=True)
class DeviceComparison:
    """Both runs and their largest differences. `levels`: of a pixel, on a scale of 0 to 255; `latent`: of the latents;
    `latent_peak`: the largest absolute value of one device's latent."""

    one: Side
    split: Side
    levels: int
    latent: float
    latent_peak: float

    @property
    def step_seconds(self) -> tuple[float, float]:
        """The seconds of a step on one device and on all: medians, or means if a step cache answered some steps."""
        one, split = (side.step(on_average=self.split.skipped) for side in (self.one, self.split))
        return as_shown(one), as_shown(split)

    @property
    def compared(self) -> str:
        """The sentence that compares both times."""
        one, split = self.step_seconds
        return compare_with_one_device(split, one)

    def headline(self) -> str:
        """Returns one line, e.g. `Ulysses 2 · 1.8 × as fast as one device · 0.31 s instead of 0.558 s per step ·
        largest difference 0 of 255`."""
        one, split = self.step_seconds
        return " · ".join(
            (
                self.split.title,
                self.compared,
                f"{split:g} s instead of {one:g} s per step",
                f"largest difference {self.levels} of 255",
            )
        )

    def lines(self) -> list[str]:
        """Returns the lines of a report, one fact each."""
        kind = "exact" if self.split.exact else "approximate"
        lines = [self._line(self.one), self._line(self.split)]
        one, split = self.step_seconds
        lines.append(f"speed: {self.compared} ({split:g} s instead of {one:g} s per step)")
        if split > one:
            lines.append("note: splitting this job costs more than it gains; one device is the faster")
        lines.append(f"largest difference: {self.levels} of 255 in the pictures ({kind})")
        relative = self.latent / self.latent_peak if self.latent_peak else 0.0
        lines.append(
            f"of the latents: {self.latent:.2g}, which is {relative:.2g} of one device's largest value"
        )
        return lines

    def _line(self, side: Side) -> str:
        on_average = self.split.skipped
        count = len(side.step_seconds)
        units = "step" if count == 1 else "steps"
        middle = "mean" if on_average else "median"
        seconds = as_shown(side.step(on_average=on_average))
        return f"{side.title}: {count} {units} in {side.seconds:.3g} s, {middle} {seconds:g} s"

    def as_dict(self) -> dict[str, object]:
        """Returns the comparison for the page; lists have one device first."""
        return {
            "headline": self.headline(),
            "titles": [self.one.title, self.split.title],
            "seconds": list(self.step_seconds),
            "compared": self.compared,
            "levels": self.levels,
            "exact": self.split.exact,
        }
