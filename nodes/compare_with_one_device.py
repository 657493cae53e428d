"""CompareWithOneDevice: Parallel Sampler's job on one device and on all, both pictures, the difference, both times."""

from __future__ import annotations

from dataclasses import replace

import comfy.sd
from comfy_api.latest import io
from torch import Tensor

from ..parallel_backend.errors import RequestError
from ..parallel_backend.planner.rules import StrategySettings
from .host.calls import RunRecord
from .host.progress import rank_bars
from .link_checks import check_links, refuse_literals
from .links import CATEGORY
from .runs.two_runs import check_comparable, check_is_picture, run_twice, show_comparison
from .sampling_job import LINKED, SamplingJob, sampling_inputs


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
                    "report",
                    tooltip="Both times, what the strategy gains, the largest difference, and what ran.",
                ),
            ],
        )

    validate_inputs = refuse_literals(*LINKED, "vae")

    @classmethod
    @rank_bars()
    def execute(cls, vae: comfy.sd.VAE, **inputs: object) -> io.NodeOutput:
        check_links(vae=vae)
        job = SamplingJob(**inputs)
        _check(job, job.settings)

        def run(settings: StrategySettings, alone: bool) -> tuple[RunRecord, Tensor]:
            wanted = replace(job, step_cache="off") if alone else job
            record = RunRecord(cache_threshold=wanted.reuse_below)
            return record, wanted.run(settings, record)

        two = run_twice(job.settings, run)
        return show_comparison(cls, vae, two, job.parallel_model.file, has_cfg=job.cfg != 1.0)


def _check(job: SamplingJob, settings: StrategySettings) -> None:
    """Raises RequestError or StrategyError for what cannot be compared, before anything is started."""
    if job.denoise == 0:
        raise RequestError("denoise is 0, so no step runs and there is nothing to compare; set it above 0.")
    check_is_picture(job.latent_image)
    job.check(replace(settings, compared=True))
    check_comparable(settings)
