"""Bytes each rank sends per step, counted in the ranks, against the closed forms (tests/closed_forms).

python benchmarks/traffic.py [--json]

A step's bytes are what a job with one more step sends in addition. The column of Flux.1-dev (1024 x 1024, 512 text
tokens, bfloat16) is computed from the same closed forms, not measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from subject import SIZES, TEXT_TOKENS, finish, make_parser, random_flux, ranks_on, sample_request

from parallel_backend.models.diffusers.checkpoint import inspect_flux
from parallel_backend.models.diffusers.keys import FLUX_DEV, FluxDims
from parallel_backend.requests import Placement
from parallel_backend.strategy import ParallelStrategy
from tests.closed_forms.pipeline_traffic import PipelineTraffic
from tests.closed_forms.traffic import expected_bytes, share_of_tokens_sent
from tests.closed_forms.weights_traffic import tensor_bytes

TOKENS, STEPS, HEADS, DOUBLE, SINGLE = 512, 2, 4, 2, 4
EXACT = STEPS + 1  # warm-up steps: all steps of the longest job, so none runs by patches
STRATEGIES = (
    (ParallelStrategy(ulysses_degree=2), 1.0),
    (ParallelStrategy(ulysses_degree=2, sends_tokens=True), 1.0),
    (ParallelStrategy(ring_degree=2), 1.0),
    (ParallelStrategy(cfg_degree=2), 4.0),
    (ParallelStrategy(data_degree=2), 4.0),
    (ParallelStrategy(pipefusion_degree=2, warmup_steps=EXACT), 1.0),
    (ParallelStrategy(pipefusion_degree=2), 1.0),
    (ParallelStrategy(tensor_degree=2), 1.0),
    (ParallelStrategy(ulysses_degree=4), 1.0),
    (ParallelStrategy(ring_degree=4), 1.0),
    (ParallelStrategy(ring_degree=2, ulysses_degree=2), 1.0),
    (ParallelStrategy(cfg_degree=2, ulysses_degree=2), 4.0),
    (ParallelStrategy(cfg_degree=2, ring_degree=2), 4.0),
    (ParallelStrategy(pipefusion_degree=4, warmup_steps=EXACT), 1.0),
    (ParallelStrategy(pipefusion_degree=4), 1.0),
    (ParallelStrategy(cfg_degree=2, pipefusion_degree=2), 4.0),
    (ParallelStrategy(tensor_degree=4), 1.0),
    (ParallelStrategy(ulysses_degree=2, tensor_degree=2), 1.0),
)


# (hidden size, width of all heads, blocks, norms over all heads) of published models, to compute what sending tokens
# saves.
SHAPES = {
    "Flux.1-dev": (3072, 3072, 57, 0),
    "Wan 2.1 14B": (5120, 5120, 40, 2),
    "Qwen-Image": (3072, 3072, 60, 0),
    "MiniMax-H3": (5376, 7168, 50, 0),
}


@dataclass(frozen=True)
class Size:
    """The sizes behind a step's bytes. `height`, `width`: of the latent; `text`: tokens; `element_size`: bytes of an
    element of activations and weights."""

    dims: FluxDims
    height: int
    width: int
    text: int
    element_size: int


FLUX_DEV_JOB = Size(
    dims=FLUX_DEV,
    height=128,
    width=128,
    text=512,
    element_size=2,
)


def main() -> None:
    args = make_parser(__doc__).parse_args()

    result = {}
    with random_flux(HEADS, DOUBLE, SINGLE) as spec:
        tiny = Size(inspect_flux(spec.path).dims, *SIZES[TOKENS], TEXT_TOKENS, element_size=4)
        for ranks in (2, 4):
            with ranks_on(*(f"cpu:{i}" for i in range(ranks))) as sidecar:
                for strategy, cfg in STRATEGIES:
                    if strategy.world_size == ranks:
                        result[_name(strategy)] = _measure(sidecar, spec, tiny, strategy, cfg)
    for name, row in result.items():
        same = "equal" if len({str(sizes) for sizes in row["per_rank"].values()}) == 1 else "DIFFERENT"
        print(
            f"{name:36s} {row['measured_bytes'] / 2**20:8.3f} MiB per rank and step at most  {same:9s}  "
            f"Flux.1-dev, computed: {row['flux_dev_expected_bytes'] / 2**20:9.1f} MiB"
        )
    for name, shape in SHAPES.items():
        share = result[f"tokens sent, {name}"] = round(share_of_tokens_sent(*shape), 3)
        print(f"Ulysses 2, tokens sent: {share} of the bytes of Ulysses 2, computed for {name}")
    finish(result, args.json)


def _name(strategy: ParallelStrategy) -> str:
    if strategy.pipefusion_degree == 1:
        return strategy.describe()
    return f"{strategy.describe()}, {'whole images' if strategy.warmup_steps == EXACT else 'patches'}"


def _measure(sidecar, spec, size: Size, strategy: ParallelStrategy, cfg: float) -> dict:
    """Returns the counted and the closed-form bytes of one step: of the busiest rank, and of each rank."""

    def sent(steps: int) -> tuple[int, ...]:
        request = sample_request(TOKENS, steps, cfg)
        return sidecar.sample(spec, request, Placement(strategy, "native")).info.bytes_sent

    rows = 2 if cfg != 1.0 else 1
    measured = [more - less for more, less in zip(sent(STEPS + 1), sent(STEPS), strict=True)]
    expected, flux_dev = (
        [_expected(strategy, rank, each, rows) for rank in range(strategy.world_size)]
        for each in (size, FLUX_DEV_JOB)
    )
    return {
        "measured_bytes": max(measured),
        "expected_bytes": max(expected),
        "flux_dev_expected_bytes": max(flux_dev),
        "per_rank": {"measured_bytes": measured, "expected_bytes": expected},
    }


def _expected(strategy: ParallelStrategy, rank: int, size: Size, rows: int) -> int:
    """Returns the bytes that `rank` sends in one step, by the closed forms."""
    dims = size.dims
    tokens = {"text": size.text, "image": size.height * size.width // 4}
    each = {"hidden": dims.hidden, "latent_elements": 16 * size.height * size.width}
    element = {"element_size": size.element_size}
    if strategy.pipefusion_degree > 1:
        layers = dims.double_blocks + dims.single_blocks
        traffic = PipelineTraffic(strategy, rank, rows, 1, layers=layers, **tokens, **each, **element)
        return traffic.whole() if strategy.warmup_steps == EXACT else traffic.flowing()
    layers = {"layers": dims.double_blocks + dims.single_blocks, "apart": dims.double_blocks}
    gathered = {"patch_channels": dims.hidden}  # tokens are gathered before the last layer
    total = expected_bytes(strategy, rank, rows=rows, **tokens, **layers, **each, **gathered, **element)
    if strategy.tensor_degree > 1:
        total += tensor_bytes(strategy, rank, dims, rows=rows, **tokens, **element)
    return total


if __name__ == "__main__":
    main()
