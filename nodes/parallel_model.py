"""Parallel Model and Parallel CLIP: nodes that have several devices compute the MODEL or CLIP of any loader. Nodes
before and after them keep working."""

from __future__ import annotations

from typing import Any

import comfy.model_patcher
from comfy_api.latest import io

from ..parallel_backend.errors import RequestError
from ..parallel_backend.options import AUTO, SAME, ComputeOptions
from ..parallel_backend.planner.rules import StrategySettings
from ..parallel_backend.requests import ModelSpec
from ..parallel_backend.sidecar.module_requests import PLACEMENTS
from .host.settings import default_settings, fingerprint
from .job.catch import Catch, catch_calls
from .job.encoder import Encoder, EncoderPatcher, stand_in_of
from .job.model import JobPatcher, make_job_patcher
from .links import (
    CATEGORY,
    OF_RANKS,
    check_links,
    compile_input,
    exchange_input,
    model_output,
    parallel_model_output,
    refuse_literals,
    strategy_input,
)
from .model.named_file import find_spec
from .preload.early_start import start_early
from .preload.next_texts import remember
from .runs.run_ui import stock_run


def over_devices(
    source: comfy.model_patcher.ModelPatcher,
    spec: ModelSpec,
    settings: StrategySettings,
    computing: ComputeOptions,
) -> JobPatcher:
    """Returns `source` as a model that the devices compute; `spec` names its weights. Reads no weights. Ranks for a
    running prompt start in the background. Raises RequestError, StrategyError or CheckpointError."""
    patcher = make_job_patcher(source, spec, settings, computing, Catch(stock_run))
    catch_calls(patcher)
    start_early(patcher.job_model, settings)
    return patcher


class ParallelModelNode(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ParallelModel",
            display_name="Parallel Model",
            category=CATEGORY,
            description="Has several devices compute a model that one of ComfyUI's own loaders has loaded: images, "
            "videos or sound, of any family. The devices read the file themselves; LoRAs and other changes come along.",
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
                exchange_input(),
            ],
            outputs=[
                model_output(),
                parallel_model_output(),
            ],
        )

    validate_inputs = refuse_literals("model", "strategy")
    fingerprint_inputs = classmethod(fingerprint)

    @classmethod
    def execute(
        cls,
        model: comfy.model_patcher.ModelPatcher,
        strategy: StrategySettings | None = None,
        compile: str = AUTO,
        exchange_dtype: str = SAME,
    ) -> io.NodeOutput:
        check_links(model=model, strategy=strategy)
        if isinstance(model, JobPatcher):
            raise RequestError(
                "This MODEL is parallel already. Connect a loader of ComfyUI's own, or take this node out."
            )
        computing = ComputeOptions(compile, exchange_dtype=exchange_dtype)
        parallel = over_devices(model, find_spec(model), strategy or default_settings(), computing)
        return io.NodeOutput(parallel, parallel)


class ParallelCLIPNode(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        kind = io.MatchType.Template("encoder", [io.Clip, io.ClipVision, io.AudioEncoder])
        return io.Schema(
            node_id="ParallelCLIP",
            display_name="Parallel CLIP",
            category=CATEGORY,
            description="Has the devices compute a text encoder of any loader: whole on the device with the most free "
            "memory, or its layers on all of them. On one device the text is exact, with split layers it is equal up "
            "to rounding; LoRAs, CLIP skip, prompt weights and embeddings work as before. Encoders of pictures (CLIP "
            "vision) and of sound work too, up to rounding.",
            search_aliases=[
                "multi gpu clip",
                "multi gpu text encoder",
                "parallel text encoder",
                "clip on second gpu",
                "dual clip",
                "clip vision",
                "audio encoder",
            ],
            inputs=[
                io.MatchType.Input(
                    "clip",
                    kind,
                    tooltip="From Load CLIP, DualCLIPLoader, Load Checkpoint or another loader, also through LoRAs; "
                    "from Load CLIP Vision or Load Audio Encoder.",
                ),
                io.Combo.Input(
                    "placement",
                    options=list(PLACEMENTS),
                    default=PLACEMENTS[0],
                    tooltip="auto: on the device with the most free memory if it fits there, else its layers on all "
                    "devices, one after the other.",
                ),
                strategy_input(OF_RANKS),
            ],
            outputs=[
                io.MatchType.Output(
                    kind,
                    id="clip",
                    display_name="clip",
                    tooltip="An ordinary CLIP (or CLIP_VISION, or AUDIO_ENCODER) for all stock nodes.",
                )
            ],
        )

    validate_inputs = refuse_literals("clip", "strategy")
    fingerprint_inputs = classmethod(fingerprint)

    @classmethod
    def execute(cls, clip: Any, placement: str, strategy: StrategySettings | None = None) -> io.NodeOutput:
        check_links(clip=clip, strategy=strategy)
        if isinstance(clip.patcher, EncoderPatcher):
            raise RequestError("This CLIP is parallel already. Connect a loader's, or take this node out.")
        encoder = Encoder(clip.patcher, strategy or default_settings(), placement)
        found = stand_in_of(clip, encoder)
        remember(found)
        return io.NodeOutput(found)
