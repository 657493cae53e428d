"""Nodes that run one job on one device and on all, and show both pictures, the difference and both times: Compare With
One Device for Parallel Sampler's job, and Prove Sampler, which the page's "Prove it" puts in place of any sampler."""

from __future__ import annotations

import copy
import inspect
from dataclasses import replace

import comfy.sd
from comfy_api.latest import io
from torch import Tensor

import nodes  # ComfyUI's own

from ..parallel_backend.errors import RequestError
from ..parallel_backend.planner.rules import StrategySettings
from .host.calls import RECORD, SETTINGS, STEP_CACHE, RunRecord
from .host.progress import rank_bars
from .job.model import JobPatcher
from .links import CATEGORY, check_links, refuse_literals
from .runs.comparison import check_comparable, check_is_picture, compare_runs
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
        _check(job, job.settings)

        def run(settings: StrategySettings, record: RunRecord, alone: bool) -> Tensor:
            return (replace(job, step_cache="off") if alone else job).run(settings, record)["samples"]

        return compare_runs(cls, vae, job.settings, job.parallel_model.job_model.file, run)


def _check(job: SamplerInputs, settings: StrategySettings) -> None:
    """Raises RequestError or StrategyError for a job that cannot be compared, before anything is started."""
    if job.denoise == 0:
        raise RequestError("denoise is 0, so no step runs and there is nothing to compare; set it above 0.")
    check_is_picture(job.latent_image)
    job.check(replace(settings, compared=True))
    check_comparable(settings)


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
        check_comparable(settings)

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
