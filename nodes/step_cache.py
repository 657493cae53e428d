"""ParallelStepCache: a node that gives a MODEL a step cache, for samplers of ComfyUI and of other packs."""

from __future__ import annotations

import comfy.model_patcher
from comfy_api.latest import io

from ..parallel_backend.errors import RequestError
from ..parallel_backend.options import check_step_cache, check_threshold
from .host.calls import SETTINGS, STEP_CACHE
from .host.settings import permitted
from .job.model import JobPatcher
from .links import CATEGORY, check_links, model_output, refuse_literals, threshold_input


class ParallelStepCache(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ParallelStepCache",
            display_name="Parallel Step Cache",
            category=CATEGORY,
            description="Lets KSampler and other samplers skip most blocks of the model in steps that change little "
            "(First Block Cache). Approximate. Parallel Sampler has inputs of its own for it.",
            search_aliases=["first block cache", "teacache", "step cache", "wavespeed", "easycache"],
            inputs=[
                io.Model.Input(
                    "model", tooltip="From Parallel Model or a loader of this pack, also through other nodes."
                ),
                threshold_input(),
            ],
            outputs=[model_output()],
        )

    validate_inputs = refuse_literals("model")

    @classmethod
    def execute(cls, model: comfy.model_patcher.ModelPatcher, cache_threshold: float) -> io.NodeOutput:
        check_links(model=model)
        check_threshold(cache_threshold)
        if not isinstance(model, JobPatcher):
            raise RequestError(
                "This MODEL is computed by ComfyUI's own process. Put Parallel Step Cache behind Parallel Model, or "
                "take it out and use ComfyUI's EasyCache."
            )
        model = model.clone()
        options = model.model_options["transformer_options"]
        settings = permitted(options[SETTINGS], steps=0, step_cache=cache_threshold > 0)
        if settings.mode == "manual":
            check_step_cache(cache_threshold, settings.strategy)
        options[STEP_CACHE] = cache_threshold
        return io.NodeOutput(model)
