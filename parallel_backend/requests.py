"""The things that cross the link between ComfyUI's process and the ranks: model specs, requests, results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .errors import RequestError
from .options import CompileStats, ComputeOptions
from .strategy import ParallelStrategy
from .trials import Trial

if TYPE_CHECKING:  # `plan` and the doctor run where torch is missing
    import torch

# How often a step of ComfyUI's samplers calls the model, of those that do so more than once in most of their steps.
SEVERAL_CALLS = {
    **dict.fromkeys(("heun", "exp_heun_2_x0", "exp_heun_2_x0_sde", "dpm_2", "dpm_2_ancestral"), 2),
    **dict.fromkeys(("dpmpp_2s_ancestral", "dpmpp_2s_ancestral_cfg_pp", "dpmpp_sde", "dpmpp_sde_gpu"), 2),
    **dict.fromkeys(("seeds_2", "sa_solver_pece"), 2),
    **dict.fromkeys(("heunpp2", "seeds_3", "dpm_fast", "dpm_adaptive"), 3),
}
FP8_FAST = "float8_e4m3fn_fast"  # kept in fp8 and multiplied in fp8 where the GPUs can, as ComfyUI calls it
WEIGHT_DTYPES = ("auto", "bfloat16", "float16", "float32", "float8_e4m3fn", FP8_FAST)


@dataclass(frozen=True)
class ComfyUISource:
    """How the user's own ComfyUI loads a model, for ranks that run its modules. `root`: ComfyUI's folder; `flags`:
    those of its command line that change numerics or attention; `part`: "diffusion_model" for a file of its own,
    "checkpoint" for one with text encoder and VAE beside it; `fp8_matmul`: fp8 weights are multiplied as they are."""

    root: str
    flags: tuple[str, ...] = ()
    part: str = "diffusion_model"
    fp8_matmul: bool = False


@dataclass(frozen=True)
class ModelSpec:
    """A model to load. `path`: of a .safetensors file; `family`: a provider's name (models/registry.py), empty for the
    first one; `weight_dtype`: one of WEIGHT_DTYPES, or torch's name of another dtype; `comfyui`: for the provider of
    that name."""

    path: str
    family: str = ""
    weight_dtype: str = "auto"
    comfyui: ComfyUISource | None = None


@dataclass(frozen=True)
class FileContent:
    """What tells a weights file from others, wherever it lies. `digest`: SHA-256 of its header and some of its data."""

    size: int
    digest: str


@dataclass(frozen=True)
class InputShapes:
    """The widths that a model takes, from its file's header. `context`, `pooled`: of a prompt; `channels_in`,
    `channels_out`: of the latent that a call takes and gives. For people: `model` is its file's name, `text_encoders`
    and `latents` say where what fits it comes from."""

    model: str
    context: int
    pooled: int
    channels_in: int
    channels_out: int
    text_encoders: str
    latents: str


@dataclass(frozen=True)
class Conditioning:
    """One prompt, encoded.

    context: [1 or B, T, context_dim] float; pooled: [1 or B, pooled_dim] float;
    guidance: [1 or B] float32; None adds no embedding of it.
    """

    context: torch.Tensor
    pooled: torch.Tensor
    guidance: torch.Tensor | None = None


@dataclass(frozen=True)
class Placement:
    """The strategy and options under which one request runs. `engine` is a wish; the result says which one ran."""

    strategy: ParallelStrategy = field(default_factory=ParallelStrategy)
    engine: str = "auto"
    compute_options: ComputeOptions = field(default_factory=ComputeOptions)


@dataclass(frozen=True)
class SampleRequest:
    """A plain sampling job, which needs no ComfyUI: Euler steps from noise.

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
        """Those that are evaluated: positive, and negative where there is one and cfg is not 1."""
        if self.negative is None or self.cfg == 1.0:
            return (self.positive,)
        return (self.positive, self.negative)


@dataclass(frozen=True)
class LoopState:
    """What the model calls of the first `step` steps of ComfyUI's loop gave, from number `first` on: the job run again
    with these is where it was. answers: [calls, prompts, B, C, …] float32, of each call what it computed of each side
    (the prompts, their opposite) before guidance."""

    step: int
    first: int
    answers: torch.Tensor


@dataclass(frozen=True)
class Rows:
    """Images of one model call that share one prompt. x [r, C, h, w] float32, sigma [r] float32, conditioning rows 1 or
    r."""

    x: torch.Tensor
    sigma: torch.Tensor
    conditioning: Conditioning


# How a call shares out the tokens of one image or video over a sequence axis: they stay apart from the first block to
# the last; each block gathers what it gives; each rank has a band of the image's rows (UNets); only the queries of
# attention are; or nothing is, whole rows of the batch only (models/tokens/table.py).
STAY, BLOCK, BANDS, ATTENTION, ROWS = TOKEN_MODES = ("stay", "block", "bands", "attention", "rows")


@dataclass(frozen=True)
class ModuleCall:
    """One call of a ComfyUI module, with the arguments that it would have got. `rows`: of the batch; `tokens`: one of
    TOKEN_MODES; `prompts`: within a job, the numbers of those whose rows these are, by which a step cache keeps;
    `inseparable`: its rows cannot be apart, for a node's code keeps what it sees of them; `joint_rows`: they cannot be
    apart, for an argument may be about several of them; `unit`: as many rows one after the other belong together;
    `by_heads`: its attention is another pack's kernel, by heads; `eager`: other code than ComfyUI's takes part within
    its blocks, so they are not compiled."""

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


@dataclass(frozen=True)
class RunInfo:
    """The record of a request that ran. Times in seconds, sizes in bytes."""

    engine: str
    strategy: ParallelStrategy
    step_seconds: tuple[float, ...] = ()  # rank 0, one per sampler step (heun: two model calls in one)
    bytes_sent: tuple[int, ...] = ()  # per rank: collective payload that left the rank
    notes: tuple[str, ...] = ()  # what was resolved or refused and replaced, in words
    exact: bool = (
        True  # False: PipeFusion used old keys and values, a call was reused, or the kernel quantises
    )
    model_calls: int = 0  # counted under a step cache and in ComfyUI's loop, else 0
    reused_calls: int = 0  # of these, what the step cache answered but for the first block
    kernel: str = "torch"  # of attention, one of options.ATTENTION_KERNELS
    compiled: CompileStats | None = None  # None where blocks were not to be compiled
    load: LoadInfo | None = None  # of the model that it ran on; what decides and measures knows of none
    # Per rank, of each of the last steps: time inside collectives; none where steps are not told apart.
    inside_seconds: tuple[tuple[float, ...], ...] = ()
    trials: tuple[Trial, ...] = ()  # of strategies within the request, of which `strategy` ran to the end
    held_seconds: float = (
        0.0  # that it had the devices: a start and a load before it, and tries after a crash, too
    )


@dataclass(frozen=True)
class SampleResult:
    """latent: [B, C, H/8, W/8] float32 on the CPU, still in the model's latent space; parts: all of what one call of
    a network gave, which has several for video with sound; denoised: like latent, what the last step took for it."""

    latent: torch.Tensor
    info: RunInfo
    parts: tuple[torch.Tensor, ...] = ()
    denoised: torch.Tensor | None = None


@dataclass(frozen=True)
class LoadInfo:
    """The outcome of loading. seconds: slowest rank; bytes: tensor bytes in the file; cached: it was loaded already;
    model: the file's name; device_bytes: of weights on a rank's accelerator; host_bytes: of its
    shares in host memory, of which whole weights, being the mapped file, take none; switched: it was held while another
    one was in use; notes: the models that were dropped for it, in words."""

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


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether no number is NaN or infinite. A sum tells at a hundredth of the cost, unless it overflows."""
    return bool(tensor.sum().isfinite()) or bool(tensor.isfinite().all())


def check_numbers(found: torch.Tensor, when: str, given: Sequence[torch.Tensor] = ()) -> None:
    """Raises RequestError for what a model gave and is NaN or infinite where its inputs, `given`, are not: the image
    would be black."""
    if not is_finite(found) and all(map(is_finite, given)):
        raise bad_numbers(when)


def bad_numbers(when: str) -> RequestError:
    return RequestError(
        f"The model gave values that are NaN or infinite {when}; the image would be black. Its file may be damaged "
        f"(download it again), a LoRA or cfg too strong, or weight_dtype too coarse (try bfloat16 or float32)."
    )
