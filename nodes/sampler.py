"""ParallelSampler: KSampler's inputs; the loop runs on the devices where the request is plain enough."""

from __future__ import annotations

import comfy.model_management
import comfy.sample
import comfy.samplers
import comfy.utils
import latent_preview
from comfy_api.latest import io

from ..parallel_backend.devices import resolve_devices
from ..parallel_backend.options import DEFAULT_THRESHOLD, STEP_CACHES, check_step_cache
from ..parallel_backend.planner.job import Job
from ..parallel_backend.planner.job_models import CheckpointModel
from ..parallel_backend.planner.rules import StrategySettings, resolve_strategy
from .host.calls import RunRecord, report_progress
from .host.progress import rank_bars
from .host.settings import permitted, price_per_gpu_hour
from .link_checks import check_links, refuse_literals
from .links import CATEGORY, ModelLink, ParallelModel, StrategyLink
from .model.options import RECORD, SETTINGS
from .model.sampler import ResidentSampler
from .report import summarise, write_report
from .run_ui import run_ui


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
            inputs=[
                ModelLink.Input("parallel_model", tooltip="From Parallel Model, or a loader of this pack."),
                io.Conditioning.Input("positive", tooltip="What the image should show."),
                io.Conditioning.Input("negative", tooltip="What it should not show; ignored at cfg 1.0."),
                io.Latent.Input(
                    "latent_image", tooltip="The latent to denoise; sets the size and the batch."
                ),
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
                    tooltip="Behind Parallel Model every sampler runs wholly on the devices. Behind Parallel Flux "
                    "Loader euler, euler_ancestral, heun and dpmpp_2m do; all else runs stepwise.",
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
                StrategyLink.Input(
                    "strategy",
                    optional=True,
                    tooltip="From Strategy Selector; replaces the loader's.",
                ),
                io.Combo.Input(
                    "step_cache",
                    options=list(STEP_CACHES),
                    default="off",
                    optional=True,
                    tooltip="first_block: a step whose first block hardly changed skips the others (First Block "
                    "Cache). Faster and approximate; the report says how often. Does nothing in stepwise sampling, nor "
                    "behind Parallel Model.",
                ),
                io.Float.Input(
                    "cache_threshold",
                    default=DEFAULT_THRESHOLD,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    round=0.001,
                    optional=True,
                    tooltip="By how much, relatively, the first block may have changed for a step to skip the others. "
                    "Lower stays closer to the exact image, 0 is exact; 0.08 to 0.12 is usual for Flux dev.",
                ),
            ],
            outputs=[
                io.Latent.Output("latent", tooltip="The denoised latent."),
                io.String.Output("report", tooltip="What ran, where, why, and how long."),
            ],
        )

    validate_inputs = refuse_literals("parallel_model", "positive", "negative", "latent_image", "strategy")

    @classmethod
    @rank_bars()
    def execute(
        cls,
        parallel_model: ParallelModel,
        positive: io.Conditioning.Type,
        negative: io.Conditioning.Type,
        latent_image: io.Latent.Type,
        seed: int,
        steps: int,
        cfg: float,
        sampler_name: str,
        scheduler: str,
        denoise: float,
        strategy: StrategySettings | None = None,
        step_cache: str = "off",
        cache_threshold: float = DEFAULT_THRESHOLD,
    ) -> io.NodeOutput:
        check_links(
            parallel_model=parallel_model,
            positive=positive,
            negative=negative,
            latent_image=latent_image,
            strategy=strategy,
        )
        record = RunRecord(
            cache_threshold=cache_threshold if step_cache != "off" else None,
            price_per_hour=price_per_gpu_hour(),
        )
        model = parallel_model.patcher.clone()
        options = model.model_options["transformer_options"]
        options[RECORD] = record
        if strategy is not None:
            options[SETTINGS] = strategy
        options[SETTINGS] = permitted(options[SETTINGS], steps, step_cache=bool(record.cache_threshold))
        _check(options[SETTINGS], parallel_model, record)

        # Hosts that put this key into a latent also take it here; older ones know neither.
        ratio = [latent_image[key] for key in ("downscale_ratio_spacial",) if key in latent_image]
        latent = comfy.sample.fix_empty_latent_channels(model, latent_image["samples"], *ratio)
        noise = comfy.sample.prepare_noise(latent, seed, latent_image.get("batch_index"))
        # KSampler's own arithmetic of steps, scheduler and denoise.
        sigmas = comfy.samplers.KSampler(
            model, steps, model.load_device, sampler_name, scheduler, denoise, model.model_options
        ).sigmas
        samples = comfy.sample.sample_custom(
            model,
            noise,
            cfg,
            ResidentSampler(sampler_name, record),
            sigmas,
            positive,
            negative,
            latent,
            noise_mask=latent_image.get("noise_mask"),
            callback=latent_preview.prepare_callback(model, steps),
            disable_pbar=not comfy.utils.PROGRESS_BAR_ENABLED,
            seed=seed,
        )
        if record.runs:  # nothing runs at denoise 0
            report_progress(summarise(record))
        out = {k: v for k, v in latent_image.items() if not k.startswith("downscale_ratio")}
        report = write_report(record)
        shown = run_ui(
            record,
            report,
            options[SETTINGS],
            parallel_model.file,
            images=samples.shape[0],
            has_cfg=cfg != 1.0,
        )
        return io.NodeOutput({**out, "samples": samples}, report, ui=shown)


def _check(settings: StrategySettings, model: ParallelModel, record: RunRecord) -> None:
    """A strategy that cannot work is refused before anything is prepared or started."""
    any_job = Job(CheckpointModel(model.file))
    decision = resolve_strategy(settings, any_job, resolve_devices(settings.devices))
    check_step_cache(record.cache_threshold or 0.0, decision.strategy)
