"""ParallelModel: any MODEL of ComfyUI's own loaders, over several devices; nodes before and after it keep working."""

from __future__ import annotations

import comfy.model_patcher
from comfy_api.latest import io

from ..parallel_backend.errors import RequestError
from ..parallel_backend.options import AUTO, ComputeOptions
from ..parallel_backend.planner.rules import StrategySettings
from ..parallel_backend.requests import ModelSpec
from .host.settings import default_settings, fingerprint
from .job.catch import Catch, catch_calls
from .job.model import JobPatcher, make_job_patcher
from .link_checks import check_links, refuse_literals
from .links import CATEGORY, ParallelModel, compile_input, model_output, parallel_model_output, strategy_input
from .model.source import spec_of
from .runs.stock_run import stock_run


def over_devices(
    source: comfy.model_patcher.ModelPatcher,
    spec: ModelSpec,
    settings: StrategySettings,
    computing: ComputeOptions,
) -> ParallelModel:
    """`source`, whose weights are `spec`'s, over the devices. Reads no weights and starts no ranks. Raises
    RequestError, StrategyError or CheckpointError."""
    patcher = make_job_patcher(source, spec, settings, computing, Catch(stock_run))
    catch_calls(patcher)
    return ParallelModel(spec, patcher.job_model.file, patcher)


class ParallelModelNode(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ParallelModel",
            display_name="Parallel Model",
            category=CATEGORY,
            description="Has several devices compute a model that one of ComfyUI's own loaders has loaded: images or "
            "videos of any family. The devices read the file themselves; LoRAs and other changes come along.",
            search_aliases=[
                "multi gpu model",
                "any model parallel",
                "distributed",
                "xdit",
                "split model",
                "raylight",
            ],
            inputs=[
                io.Model.Input(
                    "model",
                    tooltip="From Load Diffusion Model or Load Checkpoint, also through LoRAs and other model nodes.",
                ),
                strategy_input(),
                compile_input(),
            ],
            outputs=[
                model_output(),
                parallel_model_output(),
            ],
        )

    validate_inputs = refuse_literals("model", "strategy")

    @classmethod
    def fingerprint_inputs(cls, **inputs: object) -> tuple:
        return fingerprint()

    @classmethod
    def execute(
        cls,
        model: comfy.model_patcher.ModelPatcher,
        strategy: StrategySettings | None = None,
        compile: str = AUTO,
    ) -> io.NodeOutput:
        check_links(model=model, strategy=strategy)
        if isinstance(model, JobPatcher):
            raise RequestError(
                "This MODEL is parallel already. Connect a loader of ComfyUI's own, or take this node out."
            )
        parallel = over_devices(
            model, spec_of(model), strategy or default_settings(), ComputeOptions(compile)
        )
        return io.NodeOutput(parallel.patcher, parallel)
