"""ParallelSampler: a node with KSampler's inputs whose sampling loop runs on the devices; KSampler's own function
prepares it. Other nodes take the same inputs."""

from __future__ import annotations

from dataclasses import dataclass

import comfy.samplers
from comfy_api.latest import io

import nodes  # ComfyUI's own

from ..parallel_backend.devices import resolve_devices
from ..parallel_backend.options import DEFAULT_THRESHOLD, STEP_CACHES, check_step_cache
from ..parallel_backend.planner.rules import StrategySettings, resolve_strategy
from ..parallel_backend.planner.workload.checkpoint_model import CheckpointModel
from ..parallel_backend.planner.workload.workload import Job
from .host.calls import RECORD, SETTINGS, STEP_CACHE, RunRecord
from .host.page import rank_bars
from .host.settings import permitted, price_per_gpu_hour
from .job.model import JobPatcher
from .links import (
    CATEGORY,
    OF_A_SAMPLER,
    ModelLink,
    check_links,
    refuse_literals,
    strategy_input,
    threshold_input,
)
from .runs.run_ui import finish

LINKED = ("parallel_model", "positive", "negative", "latent_image", "strategy")


def sampling_inputs() -> list[io.Input]:
    """Returns the inputs of a node that samples, in the order in which the page shows those of KSampler."""
    return [
        ModelLink.Input(
            "parallel_model", tooltip="From Parallel Model, a loader of this pack, or Parallel LoRA Loader."
        ),
        io.Conditioning.Input("positive", tooltip="What the image should show."),
        io.Conditioning.Input("negative", tooltip="What it should not show; ignored at cfg 1.0."),
        io.Latent.Input("latent_image", tooltip="The latent to denoise; sets the size and the batch."),
        io.Int.Input(
            "seed",
            default=0,
            min=0,
            max=0xFFFFFFFFFFFFFFFF,
            control_after_generate=True,
            tooltip="Seed of the noise.",
        ),
        io.Int.Input("steps", default=20, min=1, max=10000, tooltip="Number of denoising steps."),
        io.Float.Input(
            "cfg",
            default=1.0,
            min=0.0,
            max=100.0,
            step=0.1,
            round=0.01,
            tooltip="Classifier-free guidance. 1.0 ignores the negative prompt, as Flux dev wants it.",
        ),
        io.Combo.Input(
            "sampler_name",
            options=comfy.samplers.KSampler.SAMPLERS,
            default="euler",
            tooltip="Every sampler of ComfyUI and of other packs runs on the devices.",
        ),
        io.Combo.Input(
            "scheduler",
            options=comfy.samplers.KSampler.SCHEDULERS,
            default="simple",
            tooltip="How noise is taken away over the steps.",
        ),
        io.Float.Input(
            "denoise",
            default=1.0,
            min=0.0,
            max=1.0,
            step=0.01,
            tooltip="Below 1.0 keeps part of the latent (image to image).",
        ),
        strategy_input(OF_A_SAMPLER),
        io.Combo.Input(
            "step_cache",
            options=list(STEP_CACHES),
            default="off",
            optional=True,
            tooltip="first_block: a step whose first block changed little skips the others (First Block Cache). "
            "Approximate; the report says how often.",
        ),
        threshold_input(optional=True),
    ]


@dataclass(frozen=True)
class SamplerInputs:
    """The values of `sampling_inputs`. Raises RequestError if a link carries a value that its input does not take."""

    parallel_model: JobPatcher
    positive: io.Conditioning.Type
    negative: io.Conditioning.Type
    latent_image: io.Latent.Type
    seed: int
    steps: int
    cfg: float
    sampler_name: str
    scheduler: str
    denoise: float
    strategy: StrategySettings | None = None
    step_cache: str = "off"
    cache_threshold: float = DEFAULT_THRESHOLD

    def __post_init__(self) -> None:
        check_links(**{name: getattr(self, name) for name in LINKED})

    @property
    def reuse_below(self) -> float | None:
        """The step cache's threshold; None if the step cache is off."""
        return self.cache_threshold if self.step_cache != "off" else None

    @property
    def settings(self) -> StrategySettings:
        """Strategy Selector's settings if it is connected, else the loader's, within what the user's settings allow."""
        chosen = self.strategy or self.parallel_model.model_options["transformer_options"][SETTINGS]
        return permitted(chosen, self.steps, step_cache=bool(self.reuse_below))

    def check(self, settings: StrategySettings) -> None:
        """Raises DeviceError, RequestError or StrategyError before anything starts if no plan can work."""
        any_job = Job(CheckpointModel(self.parallel_model.job_model.file))
        plan = resolve_strategy(settings, any_job, resolve_devices(settings.devices))
        check_step_cache(self.reuse_below or 0.0, plan.strategy)

    def run(self, settings: StrategySettings, record: RunRecord) -> io.Latent.Type:
        """Returns the latent that KSampler would give, and fills `record`."""
        model = self.parallel_model.clone()
        options = {RECORD: record, SETTINGS: settings, STEP_CACHE: self.reuse_below}
        model.model_options["transformer_options"] |= options
        (latent,) = nodes.common_ksampler(
            model,
            self.seed,
            self.steps,
            self.cfg,
            self.sampler_name,
            self.scheduler,
            self.positive,
            self.negative,
            self.latent_image,
            denoise=self.denoise,
        )
        return latent


class ParallelSampler(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ParallelSampler",
            display_name="Parallel Sampler",
            category=CATEGORY,
            description="Samples one latent on several devices at once and gives what KSampler gives on one.",
            search_aliases=[
                "multi gpu sampler",
                "ksampler parallel",
                "xdit sampler",
                "distributed",
                "raylight",
            ],
            inputs=sampling_inputs(),
            outputs=[
                io.Latent.Output("latent", tooltip="The denoised latent."),
                io.String.Output("report", tooltip="What ran, where, why, and how long."),
            ],
        )

    validate_inputs = refuse_literals(*LINKED)

    @classmethod
    @rank_bars()
    def execute(cls, **inputs: object) -> io.NodeOutput:
        job = SamplerInputs(**inputs)
        settings = job.settings
        job.check(settings)
        record = RunRecord(price_per_hour=price_per_gpu_hour())
        latent = job.run(settings, record)
        report, shown = finish(record, settings, job.parallel_model.job_model.file)
        return io.NodeOutput(latent, report, ui=shown)
