"""Runs one job twice, on all devices and on one of them, and collects what a node shows of both runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace

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
from .comparison import DeviceComparison, Side
from .report import badge, write_report
from .run_ui import panel_rows, run_ui


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
    run: Callable[[StrategySettings, bool], tuple[RunRecord, Tensor]],
) -> io.NodeOutput:
    """Calls `run(settings, alone)` to sample on all devices and then on one. Returns both pictures, the report, and the
    comparison for the node. Raises RequestError if nothing was sampled."""
    settings = replace(settings, compared=True)
    report_progress("1 of 2: all devices")
    record, all_samples = run(settings, False)
    if not record.runs:
        raise RequestError("No step ran on the devices, so there is nothing to compare.")
    report_progress("2 of 2: one device")
    # The same devices as in the first run, so that its ranks stay. This run is the reference for approximations.
    one_record, one_samples = run(
        StrategySettings(
            "manual",
            name_devices(record.devices),
            ParallelStrategy(),
            engine=settings.engine,
            compared=True,
        ),
        True,
    )
    samples = [_first(one_samples), _first(all_samples)]
    pictures = [decode_here(vae, latent) for latent in samples]
    peaks = torch.stack([(a - b).abs().max() for a, b in zip(*pictures, strict=True)])
    compared = DeviceComparison(
        one=_side(one_record),
        split=_side(record),
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


def _side(record: RunRecord) -> Side:
    return Side(
        title=record.name_of(record.strategy),
        step_seconds=tuple(seconds for run in record.runs for seconds in run.step_seconds),
        exact=all(run.exact for run in record.runs),
        skipped=any(run.reused_calls for run in record.runs),
    )


def _rows(compared: DeviceComparison, record: RunRecord, one_record: RunRecord) -> list[dict[str, object]]:
    """Returns the candidate rows of the first run, plus the one-device row of the second run."""
    one = {**panel_rows(one_record)[0], "chosen": False, "compared": ""}
    rows = [row for row in panel_rows(record) if not row["alone"]]
    return [*({**row, "compared": compared.compared if row["chosen"] else ""} for row in rows), one]
