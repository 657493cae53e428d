"""The data that crosses the link between ComfyUI's process and the ranks: model specs, requests, results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .options import CompileStats, ComputeOptions
from .strategy import ParallelStrategy
from .trials import Trial

if TYPE_CHECKING:  # `plan` and the doctor run without torch
    import torch

# Model calls per step, for the ComfyUI samplers that make more than one in most of their steps.
SEVERAL_CALLS = {
    **dict.fromkeys(("heun", "exp_heun_2_x0", "exp_heun_2_x0_sde", "dpm_2", "dpm_2_ancestral"), 2),
    **dict.fromkeys(("dpmpp_2s_ancestral", "dpmpp_2s_ancestral_cfg_pp", "dpmpp_sde", "dpmpp_sde_gpu"), 2),
    **dict.fromkeys(("seeds_2", "sa_solver_pece"), 2),
    **dict.fromkeys(("heunpp2", "seeds_3", "dpm_fast", "dpm_adaptive"), 3),
}
FP8_FAST = "float8_e4m3fn_fast"  # ComfyUI's name for weights in fp8, multiplied in fp8 if the GPUs can
WEIGHT_DTYPES = ("auto", "bfloat16", "float16", "float32", "float8_e4m3fn", FP8_FAST)


@dataclass(frozen=True)
class ComfyUISource:
    """How the user's own ComfyUI loads a model, for ranks that run ComfyUI's modules. `root`: ComfyUI's folder;
    `flags`: command-line flags that change numerics or attention; `part`: "diffusion_model" for a file with only that,
    "checkpoint" for one that also has a text encoder and VAE; `fp8_matmul`: True to multiply fp8 weights in fp8."""

    root: str
    flags: tuple[str, ...] = ()
    part: str = "diffusion_model"
    fp8_matmul: bool = False


@dataclass(frozen=True)
class ModelSpec:
    """A model to load. `path`: a .safetensors file; `family`: a provider's name (models/registry.py), empty for the
    first one; `weight_dtype`: one of WEIGHT_DTYPES, or torch's name of another dtype; `comfyui`: set only for the
    provider of that name."""

    path: str
    family: str = ""
    weight_dtype: str = "auto"
    comfyui: ComfyUISource | None = None


@dataclass(frozen=True)
class FileContent:
    """The identity of a weights file, whatever its path. `digest`: SHA-256 of its header and some of its data."""

    size: int
    digest: str


@dataclass(frozen=True)
class InputShapes:
    """The input widths of a model, from its file's header. `context`, `pooled`: widths of a prompt; `channels_in`,
    `channels_out`: latent channels into and out of a call; `model`: the file's name, for error messages."""

    model: str
    context: int
    pooled: int
    channels_in: int
    channels_out: int


@dataclass(frozen=True)
class Conditioning:
    """One prompt, encoded.

    context: [1 or B, T, context_dim] float; pooled: [1 or B, pooled_dim] float;
    guidance: [1 or B] float32; None adds no guidance embedding.
    """

    context: torch.Tensor
    pooled: torch.Tensor
    guidance: torch.Tensor | None = None


@dataclass(frozen=True)
class Placement:
    """The strategy and options of one request. `engine` is a preference; the result says which one ran."""

    strategy: ParallelStrategy = field(default_factory=ParallelStrategy)
    engine: str = "auto"
    compute_options: ComputeOptions = field(default_factory=ComputeOptions)


@dataclass(frozen=True)
class SampleRequest:
    """A plain sampling job, independent of ComfyUI: Euler steps from noise.

    noise: [B, C, H/8, W/8] float32; sigmas: [S + 1] float32, descending to 0; cfg: 1.0 means `negative` is not
    evaluated.
    """

    noise: torch.Tensor
    sigmas: torch.Tensor
    positive: Conditioning
    negative: Conditioning | None
    cfg: float

    @property
    def prompts(self) -> tuple[Conditioning, ...]:
        """The prompts to evaluate: positive, and negative if there is one and cfg is not 1."""
        if self.negative is None or self.cfg == 1.0:
            return (self.positive,)
        return (self.positive, self.negative)


@dataclass(frozen=True)
class LoopState:
    """The model's answers in the first `step` steps of ComfyUI's loop, from call number `first` on. A job that is run
    again with them reaches the same state. answers: [calls, prompts, B, C, …] float32, each call's output for each
    prompt (positive, negative) before guidance."""

    step: int
    first: int
    answers: torch.Tensor


@dataclass(frozen=True)
class Rows:
    """Images of one model call that share one prompt. x: [r, C, h, w] float32; sigma: [r] float32; conditioning: 1 or
    r rows."""

    x: torch.Tensor
    sigma: torch.Tensor
    conditioning: Conditioning


# How a call splits the tokens of one image or video over a sequence axis. stay: tokens stay apart from the first block
# to the last; block: each block gathers its output; bands: each rank has a band of the image's rows (UNets); attention:
# only attention's queries are split; rows: only whole rows of the batch are (models/tokens/table.py).
STAY, BLOCK, BANDS, ATTENTION, ROWS = TOKEN_MODES = ("stay", "block", "bands", "attention", "rows")


@dataclass
class HeadTrial:
    """Whether another pack's attention computes head by head. `differs`: True if heads that were shared out differ from
    all of them together; `seconds`: that the comparisons took."""

    differs: bool = False
    seconds: float = 0.0


@dataclass(frozen=True)
class ModuleCall:
    """One call of a ComfyUI module with its arguments. `rows`: of the batch; `tokens`: one of TOKEN_MODES; `prompts`:
    the step cache's key, which is the numbers of the call's prompts and how often this step has called for them;
    `inseparable`: True if a node's code stores what it sees of the rows, so one rank must compute all; `joint_rows`:
    True if an argument may describe several rows, so they must stay on one rank; `unit`: number of consecutive rows
    that must stay on one rank; `by_heads`: True if its attention is another pack's kernel, split by heads; `eager`:
    True if a node's code runs inside its blocks, so they are not compiled; `careful`: True if `tokens` is not the
    module's own mode because a node's code takes part; `joint_heads`: True if another pack's attention may not compute
    head by head; `head_trial`: gets whether it does, None if that is known."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rows: int
    tokens: str = BLOCK
    prompts: tuple[int, ...] = ()
    inseparable: bool = False
    joint_rows: bool = False
    unit: int = 1
    by_heads: bool = False
    eager: bool = False
    careful: bool = False
    joint_heads: bool = False
    head_trial: HeadTrial | None = None


@dataclass(frozen=True)
class RunInfo:
    """The record of a finished request. Times in seconds, sizes in bytes."""

    engine: str
    strategy: ParallelStrategy
    step_seconds: tuple[float, ...] = ()  # rank 0, one per sampler step (heun: two model calls in one step)
    bytes_sent: tuple[int, ...] = ()  # per rank: bytes that it sent in collectives
    notes: tuple[str, ...] = ()  # choices and replacements that were made, in words
    # False: PipeFusion used old keys and values, a call was reused, or the kernel quantises.
    exact: bool = True
    model_calls: int = 0  # counted with a step cache and in ComfyUI's loop, else 0
    reused_calls: int = 0  # calls that the step cache answered after their first block
    kernel: str = "torch"  # attention kernel, one of options.ATTENTION_KERNELS
    compiled: CompileStats | None = None  # None if compiling was off
    load: LoadInfo | None = None  # the model's load; None outside the sidecar
    # Per rank, the time inside collectives in each of the last steps; empty if steps are not timed separately.
    inside_seconds: tuple[tuple[float, ...], ...] = ()
    trials: tuple[Trial, ...] = ()  # strategies tried; `strategy` is the one that ran to the end
    # How long it occupied the devices, with a start and a load before it and retries after a crash.
    held_seconds: float = 0.0


@dataclass(frozen=True)
class SampleResult:
    """A sampling result. latent: [B, C, H/8, W/8] float32 on the CPU, in the model's latent space; parts: all outputs
    of one network call, several for video with sound; denoised: the last step's denoised latent, shaped like latent;
    changes: of the state of the job's objects (job/state_changes.py)."""

    latent: torch.Tensor
    info: RunInfo
    parts: tuple[torch.Tensor, ...] = ()
    denoised: torch.Tensor | None = None
    changes: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class LoadInfo:
    """The outcome of loading a model. seconds: of the slowest rank; bytes: tensor bytes in the file; cached: True if it
    was already loaded; model: the file's name; device_bytes: weights on one rank's accelerator; host_bytes: one rank's
    weight shards in host memory, 0 for whole weights, which are the mapped file; switched: True if it was already held
    and replaced another model in use; notes: the models that were dropped for it, in words."""

    seconds: float
    bytes: int
    cached: bool
    dtype: str
    compute_dtype: str
    model: str = ""
    device_bytes: int = 0
    host_bytes: int = 0
    switched: bool = False
    notes: tuple[str, ...] = ()
