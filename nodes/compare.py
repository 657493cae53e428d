"""Nodes that run one job on one device and on all, and show both pictures, the difference and both times: Compare With
One Device for Parallel Sampler's job, and Prove Sampler, which the page's "Prove it" puts in place of any sampler."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace

import comfy.sd
import torch
from comfy_api.latest import io, ui
from torch import Tensor

import nodes  # ComfyUI's own

from ..parallel_backend.devices import name_devices
from ..parallel_backend.errors import RequestError
from ..parallel_backend.models.model_file import ModelFile
from ..parallel_backend.planner.rules import StrategySettings
from ..parallel_backend.strategy import ParallelStrategy
from .host.calls import RECORD, SETTINGS, STEP_CACHE, RunRecord, report_progress
from .host.page import rank_bars
from .job.model import JobPatcher
from .job.vae import decode_here
from .links import CATEGORY, check_links, refuse_literals
from .runs.report import as_shown, badge, compare_with_one_device, usual, write_report
from .runs.run_ui import panel_rows, run_ui
from .sampler import LINKED, SamplerInputs, sampling_inputs


def _outputs(by_one: str) -> list[io.Output]:
    return [
        io.Image.Output("one_device", tooltip=by_one),
        io.Image.Output("all_devices", tooltip="What the strategy gives."),
        io.String.Output(
            "report", tooltip="Both times, what the strategy gains, the largest difference, and what ran."
        ),
    ]


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
            outputs=_outputs("What one device gives, without a step cache."),
        )

    validate_inputs = refuse_literals(*LINKED, "vae")

    @classmethod
    @rank_bars()
    def execute(cls, vae: comfy.sd.VAE, **inputs: object) -> io.NodeOutput:
        check_links(vae=vae)
        job = SamplerInputs(**inputs)
        if job.denoise == 0:
            raise RequestError(
                "denoise is 0, so no step runs and there is nothing to compare; set it above 0."
            )
        check_is_picture(job.latent_image)
        job.check(replace(job.settings, compared=True))

        def run(settings: StrategySettings, record: RunRecord, alone: bool) -> Tensor:
            return (replace(job, step_cache="off") if alone else job).run(settings, record)["samples"]

        return compare_runs(cls, vae, job.settings, job.parallel_model.job_model.file, run)


class ProveSampler(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ProveSampler",
            display_name="Prove Sampler",
            category=CATEGORY,
            description="Runs the job of any sampler on one device and on all, and shows both pictures. Prove it in a "
            "sampler's menu uses this node for one run; you need not add it by hand.",
            search_aliases=["prove it", "same picture", "parity", "benchmark", "multi gpu compare"],
            is_output_node=True,
            is_dev_only=True,
            accept_all_inputs=True,
            inputs=[
                io.String.Input("sampler_class", tooltip="The sampler's class, such as KSampler."),
                io.Vae.Input("vae", tooltip="Decodes both latents."),
            ],
            outputs=_outputs("What one device gives."),
        )

    validate_inputs = refuse_literals("vae")

    @classmethod
    @rank_bars()
    def execute(cls, sampler_class: str, vae: comfy.sd.VAE, **inputs: object) -> io.NodeOutput:
        check_links(vae=vae)
        name, patcher = _parallel_input(inputs)
        if isinstance(latent := inputs.get("latent_image"), dict):
            check_is_picture(latent)
        settings = patcher.model_options["transformer_options"].get(SETTINGS, StrategySettings())

        def run(settings: StrategySettings, record: RunRecord, alone: bool) -> Tensor:
            model = patcher.clone()
            options = model.model_options["transformer_options"]
            options |= {RECORD: record, SETTINGS: settings}
            if alone:
                options[STEP_CACHE] = None  # the reference computes every step
            changed = {**inputs, name: _with_model(inputs[name], model)}
            return _latent_of(sampler_class, changed)

        return compare_runs(cls, vae, settings, patcher.job_model.file, run)


def _parallel_input(inputs: dict[str, object]) -> tuple[str, JobPatcher]:
    """Returns the name of the input with the parallel model (or its guider) and the model, or raises RequestError."""
    for name, value in inputs.items():
        model = getattr(value, "model_patcher", value)
        if isinstance(model, JobPatcher):
            return name, model
    raise RequestError("No parallel model comes into this sampler; put Parallel Model behind its loader.")


def _with_model(value: object, model: JobPatcher) -> object:
    """Returns `model`, or a copy of the guider `value` that uses it."""
    if isinstance(value, JobPatcher):
        return model
    guider = copy.copy(value)
    guider.model_patcher, guider.model_options = model, model.model_options
    return guider


def _latent_of(sampler_class: str, inputs: dict[str, object]) -> Tensor:
    """Runs a node of this class and returns its first latent's samples. Raises RequestError if it gives no latent."""
    kind = nodes.NODE_CLASS_MAPPINGS.get(sampler_class)
    if kind is None or "LATENT" not in kind.RETURN_TYPES:
        raise RequestError(f"{sampler_class} gives no latent, so there is nothing to compare.")
    function = getattr(kind, kind.FUNCTION)
    answer = (function if inspect.ismethod(function) else getattr(kind(), kind.FUNCTION))(**inputs)
    values = getattr(answer, "result", answer)
    values = values["result"] if isinstance(values, dict) else values
    return values[list(kind.RETURN_TYPES).index("LATENT")]["samples"]


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
        reused = self.split.reused_calls
        one, split = (usual(run.step_seconds, reused) for run in (self.one, self.split))
        return as_shown(one), as_shown(split)

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
    and the comparison for the node. Raises RequestError if the settings choose one device by hand, or if nothing was
    sampled."""
    if settings.mode == "manual" and settings.strategy.world_size == 1:
        raise RequestError(
            "Strategy Selector is set by hand to one device, so there is nothing to compare it with; raise a degree, "
            "or set mode to auto."
        )
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
    # Of a model that also makes sound, the latents of the pictures alone.
    samples = [one.unbind()[0] if one.is_nested else one for one in (one_samples, all_samples)]
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
    worst = int(peaks.argmax())  # the picture of a batch or video that differs most
    saved = ui.PreviewImage(torch.stack([picture[worst] for picture in pictures]), cls=cls).as_dict()
    shown = run_ui(record, report, settings, file) | {
        "parallel_headline": [compared.headline()],
        "parallel_badge": [
            badge(record) | {"seconds": compared.step_seconds[1], "compared": compared.compared}
        ],
        "parallel_candidates": _rows(compared, record, one_record),
        "parallel_comparison": [
            {**compared.as_dict(), "pictures": saved["images"], "devices": len(record.devices)}
        ],
    }
    return io.NodeOutput(*pictures, report, ui=shown)


def _rows(compared: DeviceComparison, record: RunRecord, one_record: RunRecord) -> list[dict[str, object]]:
    """Returns the candidate rows of the first run, plus the one-device row of the second run."""
    one = {**panel_rows(one_record)[0], "chosen": False, "compared": ""}
    rows = [row for row in panel_rows(record) if not row["alone"]]
    return [*({**row, "compared": compared.compared if row["chosen"] else ""} for row in rows), one]
