"""StrategySelector: which devices, and how to split one sampling job over them."""

from __future__ import annotations

from comfy_api.latest import io

from ..parallel_backend.choice import APPROXIMATION
from ..parallel_backend.devices import is_cpu, resolve_devices
from ..parallel_backend.flux_keys import FLUX_DEV
from ..parallel_backend.memory_model import Job, fullest_rank, predict_memory
from ..parallel_backend.selector import MODES, StrategyChoice, resolve
from ..parallel_backend.strategy import ENGINES, ModelShape, ParallelStrategy, RequestShape
from .links import CATEGORY, StrategyLink

_FLUX = ModelShape(heads=24, blocks=57, name="Flux.1")
_SQUARE = Job(height=128, width=128)  # latent pixels


def _degree(name: str, tooltip: str) -> io.Int.Input:
    return io.Int.Input(name, default=1, min=1, max=64, tooltip=tooltip + " Counts in manual mode only.")


# A request that gives every degree something to do.
_ANY = RequestShape(batch=64, has_cfg=True)
# Inputs that came later: workflows without them still load.
_OPTIONAL = (
    io.Int.Input(
        "tensor_degree",
        default=1,
        min=1,
        max=64,
        optional=True,
        tooltip="Splits every layer's heads and columns, and so the weights; wants fast links. "
        "Counts in manual mode only.",
    ),
    io.Boolean.Input(
        "shard_weights",
        default=False,
        optional=True,
        tooltip="Each device keeps its share of the weights and fetches the rest block by block (FSDP): for models "
        "larger than a card. Counts in manual mode only.",
    ),
    io.Boolean.Input(
        "offload_weights",
        default=False,
        optional=True,
        tooltip="Keeps the shares in the computer's memory: slowest, smallest. Counts in manual mode only.",
    ),
    io.Int.Input(
        "num_pipeline_patch",
        default=0,
        min=0,
        max=1024,
        optional=True,
        tooltip="Patches that PipeFusion cuts an image into; 0 for as many as pipefusion_degree. "
        "Counts in manual mode only.",
    ),
    io.Int.Input(
        "warmup_steps",
        default=1,
        min=0,
        max=10000,
        optional=True,
        tooltip="PipeFusion's exact first steps. More come nearer to one device's image; as many as steps is exact. "
        "Counts in manual mode only.",
    ),
    io.String.Input(
        "device_shares",
        default="",
        optional=True,
        tooltip="For devices that differ: how much of an image (or of the model, with PipeFusion) each takes, such as "
        "24,16; memory goes by their memory; empty shares evenly. Counts in both modes.",
    ),
    io.Combo.Input(
        "approximation",
        options=list(APPROXIMATION),
        default="if_needed",
        optional=True,
        tooltip="Whether auto may choose PipeFusion, which is approximate: never, only when nothing exact fits in "
        "memory (if_needed), or also for speed where the links were measured and are slow (allowed).",
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
            search_aliases=["multi gpu", "ulysses", "ring attention", "usp", "cfg parallel", "xdit", "split"],
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
                    tooltip="all, or GPU numbers such as 0,1,3. On the CPU the number of ranks, such as cpu:2.",
                ),
                _degree(
                    "cfg_degree", "2 computes the positive and the negative prompt on different devices."
                ),
                _degree(
                    "pipefusion_degree",
                    "Splits the model's blocks over devices, through which patches of the image flow: needs little "
                    "memory and no fast links; approximate after warmup_steps.",
                ),
                _degree("ring_degree", "Splits an image's tokens; keys and values travel round a ring."),
                _degree(
                    "ulysses_degree",
                    "Splits an image's tokens; must divide the attention heads (24 in Flux.1).",
                ),
                _degree("data_degree", "Splits a batch of images."),
                io.Combo.Input(
                    "engine",
                    options=list(ENGINES),
                    default="auto",
                    tooltip="Who computes attention across devices. auto takes the fastest exact one.",
                ),
                *_OPTIONAL,
            ],
            outputs=[
                StrategyLink.Output("strategy", tooltip="For Parallel Flux Loader or Parallel Sampler."),
                io.String.Output("why", tooltip="The choice in words."),
            ],
        )

    @classmethod
    def execute(
        cls,
        mode: str,
        devices: str,
        engine: str,
        device_shares: str = "",
        approximation: str = "if_needed",
        **settings: int | bool,
    ) -> io.NodeOutput:
        choice = StrategyChoice(
            mode, devices, ParallelStrategy(**settings), engine, device_shares, approximation
        )
        return io.NodeOutput(choice, _in_words(choice))


def _in_words(choice: StrategyChoice) -> str:
    """What will run. Raises StrategyError for what no model could run; the model's own rules are checked with it."""
    devices = resolve_devices(choice.devices)
    if choice.mode == "manual":
        # Zero heads divide by everything: only the rules that hold for any model.
        decision = resolve(choice, ModelShape(heads=0, blocks=0), _ANY, devices)
        said = f"{decision.strategy.describe()} on {', '.join(devices)}, set by hand"
        notes = [note.rstrip(".") for note in decision.notes]
        return ". ".join([said, *notes, _memory(decision.strategy, devices)]) + "."
    plain, with_cfg = (
        resolve(choice, _FLUX, RequestShape(batch=1, has_cfg=has_cfg), devices) for has_cfg in (False, True)
    )
    memory = _memory(plain.strategy, devices)
    if plain.strategy == with_cfg.strategy:
        return f"auto on {', '.join(devices)}. By the rule for Flux.1: {plain.reason}. {memory}."
    return (
        f"auto on {', '.join(devices)}. By the rule for Flux.1 without a negative prompt: {plain.reason}. "
        f"With one: {with_cfg.reason}. {memory}."
    )


def _memory(strategy: ParallelStrategy, devices: tuple[str, ...]) -> str:
    """What the fullest device will hold, before a model is chosen."""
    memories = predict_memory(FLUX_DEV, "bfloat16", strategy, _SQUARE, on_cpu=is_cpu(devices))
    return f"Predicted for FLUX.1-dev in bf16 at 1024x1024: {fullest_rank(memories).describe()} on the fullest device"
