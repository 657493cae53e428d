"""One job run twice, on all devices and on one of them, and what a node shows of that."""

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
from .comparison import Comparison, Side
from .report import badge, write_report
from .run_ui import panel_rows, run_ui

ALONE = ParallelStrategy()


@dataclass(frozen=True)
class TwoRuns:
    """What one device did and gave, and what all did and gave under `settings`."""

    settings: StrategySettings
    one_record: RunRecord
    one_samples: Tensor
    record: RunRecord
    samples: Tensor

    @property
    def comparison(self) -> Comparison:
        """But for the pictures, whose largest difference is yet 0."""
        return Comparison(
            one=_side(self.one_record),
            split=_side(self.record),
            levels=0,
            latent=(self.one_samples - self.samples).abs().max().item(),
            latent_peak=self.one_samples.abs().max().item(),
        )


def check_comparable(settings: StrategySettings) -> None:
    """Raises RequestError for settings that a person has set to what they would be compared with."""
    if settings.mode == "manual" and settings.strategy.world_size == 1:
        raise RequestError(
            "Strategy Selector is set by hand to one device, so there is nothing to compare it with; raise a degree, "
            "or set mode to auto."
        )


def check_is_picture(latent: io.Latent.Type) -> None:
    """Raises RequestError for a latent without one."""
    samples = latent["samples"]
    if not samples.is_nested and samples.ndim < 4:
        raise RequestError(
            "The latent_image is sound, of which there is no picture to compare; connect one of images or of a video."
        )


def run_twice(
    settings: StrategySettings, run: Callable[[StrategySettings, bool], tuple[RunRecord, Tensor]]
) -> TwoRuns:
    """`run(settings, alone)`, where one device is alone. Raises RequestError where nothing was sampled."""
    settings = replace(settings, compared=True)
    report_progress("1 of 2: all devices")
    record, samples = run(settings, False)
    if not record.runs:
        raise RequestError("No step ran on the devices, so there is nothing to compare.")
    report_progress("2 of 2: one device")
    # The very devices of the first run, so that its ranks stay; approximations are what it is compared with.
    one = StrategySettings(
        "manual", name_devices(record.devices), ALONE, engine=settings.engine, compared=True
    )
    one_record, one_samples = run(one, True)
    return TwoRuns(settings, one_record, _first(one_samples), record, _first(samples))


def show_comparison(
    cls: type[io.ComfyNode], vae: comfy.sd.VAE, two: TwoRuns, file: ModelFile, *, has_cfg: bool
) -> io.NodeOutput:
    """Both pictures and the report as outputs, and the comparison on the node."""
    pictures = _decode(vae, two.one_samples), _decode(vae, two.samples)
    differences = [(a - b).abs() for a, b in zip(pictures[0], pictures[1], strict=True)]
    peaks = torch.stack([difference.max() for difference in differences])
    compared = replace(two.comparison, levels=round(255 * peaks.max().item()))
    report_progress(compared.headline())
    record = two.record
    report = "\n".join([*compared.lines(), "", "the run on all devices", write_report(record)])
    seconds = compared.step_seconds[1]
    worst = int(peaks.argmax())  # of a batch or a video: where they differ most
    saved = ui.PreviewImage(torch.stack([picture[worst] for picture in pictures]), cls=cls).as_dict()
    shown = run_ui(record, report, two.settings, file, images=len(two.samples), has_cfg=has_cfg) | {
        "parallel_headline": [compared.headline()],
        "parallel_badge": [asdict(replace(badge(record), seconds=seconds, compared=compared.compared))],
        "parallel_candidates": _rows(compared, record, two.one_record),
        "parallel_comparison": [
            {**compared.as_dict(), "pictures": saved["images"], "devices": len(record.devices)}
        ],
    }
    return io.NodeOutput(*pictures, report, ui=shown)


def _first(samples: Tensor) -> Tensor:
    """The pictures of models that have sound beside them."""
    return samples.unbind()[0] if samples.is_nested else samples


def _side(record: RunRecord) -> Side:
    return Side(
        title=record.name_of(record.strategy),
        step_seconds=tuple(seconds for run in record.runs for seconds in run.step_seconds),
        exact=all(run.exact for run in record.runs),
        skipped=any(run.reused_calls for run in record.runs),
    )


def _rows(compared: Comparison, record: RunRecord, one_record: RunRecord) -> list[dict[str, object]]:
    """The candidates of the first run, with what one device took in the second."""
    one = {**panel_rows(one_record)[0], "chosen": False, "compared": ""}
    rows = [row for row in panel_rows(record) if not row["alone"]]
    return [*({**row, "compared": compared.compared if row["chosen"] else ""} for row in rows), one]


def _decode(vae: comfy.sd.VAE, samples: Tensor) -> Tensor:
    """IMAGE [N, H, W, C], the frames of a video as VAEDecode has them."""
    image = vae.decode(samples)
    return image.reshape(-1, *image.shape[-3:]) if image.ndim == 5 else image
