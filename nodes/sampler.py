"""ParallelSampler: a node with KSampler's inputs whose sampling loop runs on the devices."""

from __future__ import annotations

from comfy_api.latest import io

from .host.calls import RunRecord
from .host.progress import rank_bars
from .host.settings import price_per_gpu_hour
from .link_checks import refuse_literals
from .links import CATEGORY
from .runs.run_ui import finish
from .sampling_job import LINKED, SamplerInputs, sampling_inputs


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
