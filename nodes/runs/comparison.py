"""Runs one job on all devices and on one of them, and compares both runs: times, gain, largest difference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import comfy.sd
import torch
from comfy_api.latest import io, ui
from torch import Tensor

from ...parallel_backend.devices import name_devices
from ...parallel_backend.errors import RequestError
from ...parallel_backend.models.model_file import ModelFile
from ...parallel_backend.planner.rules import StrategySettings
from ...parallel_backend.strategy import ParallelStrategy
from ..host.calls import RunRecord, report_progress
from ..host.vae_ranks import decode_here
from .report import badge, write_report
from .run_ui import panel_rows, run_ui
from .speed import as_shown, average, compare_with_one_device, typical


@dataclass(frozen=True)
class DeviceComparison:
    """A run on one device and one on all, each with at least one step, and their largest differences. `levels`: of a
    pixel, on a scale of 0 to 255; `latent`: of the latents; `latent_peak`: the largest absolute value of one device's
    latent."""

    one: RunRecord
    split: RunRecord
    levels: int
    latent: float
    latent_peak: float

    @property
    def step_seconds(self) -> tuple[float, float]:
        """The seconds of a step on one device and on all: medians, or means if a step cache answered some steps. The
        first step is left out if there are others: it includes one-time costs."""
        middle = average if self.split.reused_calls else typical
        return as_shown(middle(self.one.step_seconds)), as_shown(middle(self.split.step_seconds))

    @property
    def compared(self) -> str:
        """The sentence that compares both times."""
        one, split = self.step_seconds
        return compare_with_one_device(split, one)

    @property
    def titles(self) -> list[str]:
        """Both strategies in words."""
        return [record.name_of(record.strategy) for record in (self.one, self.split)]

    def headline(self) -> str:
        """Returns one line, e.g. `Ulysses 2 · 1.8 × as fast as one device · 0.31 s instead of 0.558 s per step ·
        largest difference 0 of 255`."""
        one, split = self.step_seconds
        return (
            f"{self.titles[1]} · {self.compared} · {split:g} s instead of {one:g} s per step · "
            f"largest difference {self.levels} of 255"
        )

    def lines(self) -> list[str]:
        """Returns the lines of a report, one fact each."""
        middle = "mean" if self.split.reused_calls else "median"
        lines = []
        for title, record, seconds in zip(
            self.titles, (self.one, self.split), self.step_seconds, strict=True
        ):
            times = record.step_seconds
            steps = f"{len(times)} step{'s' if len(times) > 1 else ''}"
            lines.append(f"{title}: {steps} in {sum(times):.3g} s, {middle} {seconds:g} s")
        one, split = self.step_seconds
        lines.append(f"speed: {self.compared} ({split:g} s instead of {one:g} s per step)")
        if split > one:
            lines.append("note: splitting this job costs more than it gains; one device is the faster")
        kind = "exact" if self.split.exact else "approximate"
        lines.append(f"largest difference: {self.levels} of 255 in the pictures ({kind})")
        relative = self.latent / self.latent_peak if self.latent_peak else 0.0
        lines.append(
            f"of the latents: {self.latent:.2g}, which is {relative:.2g} of one device's largest value"
        )
        return lines

    def as_dict(self) -> dict[str, object]:
        """Returns the comparison for the page; lists have one device first."""
        return {
            "titles": self.titles,
            "seconds": list(self.step_seconds),
            "compared": self.compared,
            "levels": self.levels,
            "exact": self.split.exact,
        }


def check_comparable(settings: StrategySettings) -> None:
    """Raises RequestError if the settings choose one device by hand, which leaves nothing to compare."""
    if settings.mode == "manual" and settings.strategy.world_size == 1:
        raise RequestError(
            "Strategy Selector is set by hand to one device, so there is nothing to compare it with; raise a degree, "
            "or set mode to auto."
        )


def check_is_picture(latent: io.Latent.Type) -> None:
    """Raises RequestError for a latent without a picture, such as sound."""
    samples = latent["samples"]
    if not samples.is_nested and samples.ndim < 4:
        raise RequestError(
            "The latent_image is sound, of which there is no picture to compare; connect one of images or of a video."
        )


def compare_runs(
    cls: type[io.ComfyNode],
    vae: comfy.sd.VAE,
    settings: StrategySettings,
    file: ModelFile,
    run: Callable[[StrategySettings, RunRecord, bool], Tensor],
) -> io.NodeOutput:
    """Calls `run(settings, record, alone)` to sample on all devices and then on one. Returns both pictures, the report,
    and the comparison for the node. Raises RequestError if nothing was sampled."""
    record, one_record = RunRecord(), RunRecord()
    settings = replace(settings, compared=True)
    report_progress("1 of 2: all devices")
    all_samples = run(settings, record, False)
    if not record.runs:
        raise RequestError("No step ran on the devices, so there is nothing to compare.")
    report_progress("2 of 2: one device")
    # The same devices as in the first run, so that its ranks stay. This run is the reference for approximations.
    devices = name_devices(record.devices)
    one_device = StrategySettings(
        "manual", devices, ParallelStrategy(), engine=settings.engine, compared=True
    )
    one_samples = run(one_device, one_record, True)
    samples = [_first(one_samples), _first(all_samples)]
    pictures = [decode_here(vae, latent) for latent in samples]
    peaks = torch.stack([(a - b).abs().max() for a, b in zip(*pictures, strict=True)])
    compared = DeviceComparison(
        one=one_record,
        split=record,
        levels=round(255 * peaks.max().item()),
        latent=(samples[0] - samples[1]).abs().max().item(),
        latent_peak=samples[0].abs().max().item(),
    )
    report_progress(compared.headline())
    report = "\n".join([*compared.lines(), "", "the run on all devices", write_report(record)])
    seconds = compared.step_seconds[1]
    worst = int(peaks.argmax())  # the picture of a batch or video that differs most
    saved = ui.PreviewImage(torch.stack([picture[worst] for picture in pictures]), cls=cls).as_dict()
    shown = run_ui(record, report, settings, file) | {
        "parallel_headline": [compared.headline()],
        "parallel_badge": [asdict(replace(badge(record), seconds=seconds, compared=compared.compared))],
        "parallel_candidates": _rows(compared, record, one_record),
        "parallel_comparison": [
            {**compared.as_dict(), "pictures": saved["images"], "devices": len(record.devices)}
        ],
    }
    return io.NodeOutput(*pictures, report, ui=shown)


def _first(samples: Tensor) -> Tensor:
    """Returns the latent of the pictures alone, for models that also make sound."""
    return samples.unbind()[0] if samples.is_nested else samples


def _rows(compared: DeviceComparison, record: RunRecord, one_record: RunRecord) -> list[dict[str, object]]:
    """Returns the candidate rows of the first run, plus the one-device row of the second run."""
    one = {**panel_rows(one_record)[0], "chosen": False, "compared": ""}
    rows = [row for row in panel_rows(record) if not row["alone"]]
    return [*({**row, "compared": compared.compared if row["chosen"] else ""} for row in rows), one]
