"""CompareWithOneDevice: Parallel Sampler's job on one device and on all, both pictures, the difference, both times."""

from __future__ import annotations

from dataclasses import asdict, replace

import comfy.sd
import torch
from comfy_api.latest import io, ui
from torch import Tensor

from ..parallel_backend.devices import name_devices
from ..parallel_backend.errors import RequestError
from ..parallel_backend.planner.rules import StrategySettings
from ..parallel_backend.strategy import ParallelStrategy
from .comparison import Comparison, Side
from .host.calls import RunRecord, report_progress
from .host.progress import rank_bars
from .link_checks import check_links, refuse_literals
from .links import CATEGORY
from .report import badge, write_report
from .run_ui import panel_rows, run_ui
from .sampling_job import LINKED, SamplingJob, sampling_inputs

ALONE = ParallelStrategy()


class CompareWithOneDevice(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CompareWithOneDevice",
            display_name="Compare With One Device",
            category=CATEGORY,
            description="Runs the same job on one device and on all, and shows both pictures, their largest difference "
            "and both times.",
            search_aliases=["speed-up", "benchmark", "parity", "prove", "multi gpu compare", "raylight"],
            is_output_node=True,
            inputs=[
                *sampling_inputs(),
                io.Vae.Input("vae", tooltip="Decodes both latents."),
            ],
            outputs=[
                io.Image.Output("one_device", tooltip="What one device gives, without a step cache."),
                io.Image.Output("all_devices", tooltip="What the strategy gives."),
                io.String.Output(
                    "report", tooltip="Both times, the speed-up, the largest difference, and what ran."
                ),
            ],
        )

    validate_inputs = refuse_literals(*LINKED, "vae")

    @classmethod
    @rank_bars()
    def execute(cls, vae: comfy.sd.VAE, **inputs: object) -> io.NodeOutput:
        check_links(vae=vae)
        job = SamplingJob(**inputs)
        settings = replace(job.settings, compared=True)
        _check(job, settings)
        report_progress("1 of 2: all devices")
        record, samples = _run(job, settings)
        report_progress("2 of 2: one device")
        # The very devices of the first run, so that its ranks stay; approximations are what it is compared with.
        one = StrategySettings(
            "manual", name_devices(record.devices), ALONE, engine=settings.engine, compared=True
        )
        one_record, one_samples = _run(replace(job, step_cache="off"), one)
        pictures = _decode(vae, one_samples), _decode(vae, samples)
        differences = [(a - b).abs() for a, b in zip(pictures[0], pictures[1], strict=True)]
        peaks = torch.stack([difference.max() for difference in differences])
        stepwise = record.stepwise_because or one_record.stepwise_because
        compared = Comparison(
            one=_side(one_record),
            split=_side(record),
            unit="step" if stepwise is None else "model call",
            levels=round(255 * peaks.max().item()),
            latent=(one_samples - samples).abs().max().item(),
            latent_peak=one_samples.abs().max().item(),
        )
        report_progress(compared.headline())
        report = "\n".join([*compared.lines(), "", "the run on all devices", write_report(record)])
        worst = int(peaks.argmax())  # of a batch or a video: where they differ most
        saved = ui.PreviewImage(torch.stack([picture[worst] for picture in pictures]), cls=cls).as_dict()
        file, has_cfg = job.parallel_model.file, job.cfg != 1.0
        shown = run_ui(record, report, settings, file, images=len(samples), has_cfg=has_cfg) | {
            "parallel_headline": [compared.headline()],
            "parallel_badge": [asdict(replace(badge(record), speed_up=compared.speed_up))],
            "parallel_candidates": _rows(record, one_record),
            "parallel_comparison": [{**compared.as_dict(), "pictures": saved["images"]}],
        }
        return io.NodeOutput(*pictures, report, ui=shown)


def _check(job: SamplingJob, settings: StrategySettings) -> None:
    """Raises RequestError or StrategyError for what cannot be compared, before anything is started."""
    if job.denoise == 0:
        raise RequestError("denoise is 0, so no step runs and there is nothing to compare; set it above 0.")
    samples = job.latent_image["samples"]
    if not samples.is_nested and samples.ndim < 4:
        raise RequestError(
            "The latent_image is sound, of which there is no picture to compare; connect one of images or of a video."
        )
    decision = job.check(settings)
    if settings.mode == "manual" and decision.strategy.world_size == 1:
        raise RequestError(
            "Strategy Selector is set by hand to one device, so there is nothing to compare it with; raise a degree, "
            "or set mode to auto."
        )


def _run(job: SamplingJob, settings: StrategySettings) -> tuple[RunRecord, Tensor]:
    record = RunRecord(cache_threshold=job.reuse_below)
    samples = job.run(settings, record)
    if samples.is_nested:  # models with sound beside their pictures
        samples = samples.unbind()[0]
    return record, samples


def _side(record: RunRecord) -> Side:
    return Side(
        title=record.name_of(record.strategy),
        step_seconds=tuple(seconds for run in record.runs for seconds in run.step_seconds),
        exact=all(run.exact for run in record.runs),
        skipped=any(run.reused_calls for run in record.runs),
    )


def _rows(record: RunRecord, one_record: RunRecord) -> list[dict[str, object]]:
    """The candidates of the first run, with what one device took in the second."""
    one = {**panel_rows(one_record)[0], "chosen": False}
    return [*(row for row in panel_rows(record) if not row["alone"]), one]


def _decode(vae: comfy.sd.VAE, samples: Tensor) -> Tensor:
    """IMAGE [N, H, W, C], the frames of a video as VAEDecode has them."""
    image = vae.decode(samples)
    return image.reshape(-1, *image.shape[-3:]) if image.ndim == 5 else image
