"""StrategySelector: a node that chooses the devices and how to split one sampling job over them."""

from __future__ import annotations

import asyncio
from dataclasses import fields

from comfy_api.latest import io

from ..parallel_backend.models.model_file import ModelFile
from ..parallel_backend.observability.preview.form import LIMITS, SelectorInputs, find_problems
from ..parallel_backend.observability.preview.preview import preview
from ..parallel_backend.planner.candidates import APPROXIMATION
from ..parallel_backend.planner.rules import MODES
from ..parallel_backend.strategy import ENGINES
from .host.prompt_graph import value_of
from .host.prompt_links import current_node
from .links import CATEGORY, StrategyLink
from .model.named_file import files_decided_by


def _number(name: str, default: int, tooltip: str, **more: bool) -> io.Int.Input:
    """Returns an input that `auto` decides: ComfyUI folds it away, web/strategy_panel.js shows it in manual mode."""
    least, most = LIMITS[name]
    return io.Int.Input(name, default=default, min=least, max=most, tooltip=tooltip, advanced=True, **more)


def _degree(name: str, tooltip: str) -> io.Int.Input:
    return _number(name, 1, tooltip + " Applies in manual mode only.")


# Inputs that were added later: workflows without them still load.
_OPTIONAL = (
    _number(
        "tensor_degree",
        1,
        "Splits every layer's heads and columns, and so the weights; wants fast links. Applies in manual mode only.",
        optional=True,
    ),
    io.Boolean.Input(
        "shard_weights",
        default=False,
        optional=True,
        advanced=True,
        tooltip="Each device keeps its share of the weights and fetches the rest block by block (FSDP): for models "
        "larger than a card. Applies in manual mode only.",
    ),
    io.Boolean.Input(
        "offload_weights",
        default=False,
        optional=True,
        advanced=True,
        tooltip="Keeps the shares in the computer's memory: slowest, smallest. Applies in manual mode only.",
    ),
    _number(
        "num_pipeline_patch",
        0,
        "Patches that PipeFusion cuts an image into; 0 for as many as pipefusion_degree. Applies in manual mode only.",
        optional=True,
    ),
    _number(
        "warmup_steps",
        1,
        "PipeFusion's exact first steps. More come nearer to one device's image; as many as steps is exact. "
        "Applies in manual mode only.",
        optional=True,
    ),
    io.String.Input(
        "device_shares",
        default="",
        optional=True,
        tooltip="For devices that differ: how much of an image (or of the model, with PipeFusion) each takes, such as "
        "24,16. The word memory shares by the devices' memory; empty shares evenly. Applies in both modes.",
    ),
    io.Combo.Input(
        "approximation",
        options=list(APPROXIMATION),
        default="if_needed",
        optional=True,
        tooltip="Whether auto may choose PipeFusion, which is approximate: never, only when nothing exact fits in "
        "memory (if_needed), or also where it was measured to be faster (allowed).",
    ),
)


class StrategySelector(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="StrategySelector",
            display_name="Strategy Selector",
            category=CATEGORY,
            description="Chooses the devices of a sampling job and how the job is split over them.",
            search_aliases=[
                "multi gpu",
                "ulysses",
                "ring attention",
                "usp",
                "cfg parallel",
                "xdit",
                "split",
                "raylight",
            ],
            inputs=[
                io.Combo.Input(
                    "mode",
                    options=list(MODES),
                    default="auto",
                    tooltip="auto picks a strategy for each request and says why; manual takes the degrees below.",
                ),
                io.String.Input(
                    "devices",
                    default="all",
                    tooltip="all, or GPU numbers such as 0,1,3 or 0-3; cluster:NAME for those of other machines. "
                    "On the CPU the number of processes, such as cpu:2.",
                ),
                _degree(
                    "cfg_degree", "2 computes the positive and the negative prompt on different devices."
                ),
                _degree(
                    "pipefusion_degree",
                    "Splits the model's blocks over devices, through which patches of the image flow. Slow links "
                    "suffice; approximate after warmup_steps.",
                ),
                _degree("ring_degree", "Splits an image's tokens; keys and values travel round a ring."),
                _degree(
                    "ulysses_degree",
                    "Splits an image's tokens; at most one device for each attention head (24 in Flux.1).",
                ),
                _degree("data_degree", "Splits a batch of images."),
                io.Combo.Input(
                    "engine",
                    options=list(ENGINES),
                    default="auto",
                    tooltip="Who computes attention across devices: native or xfuser. auto is native.",
                ),
                *_OPTIONAL,
            ],
            outputs=[
                StrategyLink.Output(
                    "strategy",
                    tooltip="For Parallel Model, a loader of this pack, Parallel Sampler, Parallel CLIP, Parallel VAE "
                    "Decode or Parallel VAE Encode.",
                ),
                io.String.Output("why", tooltip="The choice in words."),
            ],
        )

    @classmethod
    async def validate_inputs(
        cls,
        mode: str | None = None,
        devices: str | None = None,
        cfg_degree: int | None = None,
        pipefusion_degree: int | None = None,
        ring_degree: int | None = None,
        ulysses_degree: int | None = None,
        data_degree: int | None = None,
        tensor_degree: int | None = 1,
        device_shares: str | None = "",
    ) -> bool | str:
        """Returns True, or a line `inputs: words` per problem: ComfyUI then refuses the prompt. Checks by the rules
        of the models that the selector decides for, or by those of any model if the prompt does not name them.

        ComfyUI marks every input named here as wrong; web/errors.js keeps the marks of those that a line names. An
        input that another node has to run for is None, and `execute` checks it. ComfyUI reports a missing input.
        """
        given = {name: value for name, value in locals().items() if name != "cls"}
        # Off the event loop: reading a large model's header for the first time takes a second.
        return await asyncio.to_thread(_problems, given)

    @classmethod
    def fingerprint_inputs(cls, **inputs: object) -> tuple[str, ...]:
        """Returns ids of all models that `why` may describe, run or not: a change makes ComfyUI rerun the loaders."""
        return tuple(str(file.fingerprint) + file.name for file in _files())

    @classmethod
    def execute(cls, **inputs: str | int | bool) -> io.NodeOutput:
        settings = SelectorInputs(**inputs).settings()
        return io.NodeOutput(settings, preview(settings, next(iter(_files()), None)).why)


def _files() -> list[ModelFile]:
    """Returns the models that the current node decides for, also those whose loaders do not run."""
    at = current_node()
    return [] if at is None else files_decided_by(*at, run=False)


def _problems(given: dict[str, object]) -> bool | str:
    at = current_node()
    if at is not None:
        given = {name: value_of(*at, name) if value is None else value for name, value in given.items()}
    kinds = {field.name: type(field.default) for field in fields(SelectorInputs)}
    known = {name: value for name, value in given.items() if type(value) is kinds[name]}
    if not {"mode", "devices"} <= set(known):
        return True
    files = [] if known["mode"] == "auto" or at is None else files_decided_by(*at)
    found = find_problems(SelectorInputs(**known), files)
    certain = [problem for problem in found if set(problem.inputs) <= {*known}]
    return "\n".join(f"{', '.join(p.inputs)}: {p.message}" for p in certain) or True
