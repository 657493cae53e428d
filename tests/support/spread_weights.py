"""What tests of sharded and sliced weights share: a tiny Flux per number of heads, and a sampling run on one rank."""

from __future__ import annotations

from flux_requests import CASES_OF_TWO_STEPS, CONTEXT, POOLED
from oracle import oracle_subject
from parallel_backend.engine.comm.groups import Layouts
from plain_jobs import PlainJobs
from ranks import run_ranks
from tests.closed_forms.traffic import expected_bytes
from tests.closed_forms.weights_traffic import tensor_bytes

DOUBLE, SINGLE = 1, 2
CASES = {
    name: CASES_OF_TWO_STEPS[name]
    for name in (
        "not dividing, cfg 1, batch 1",
        "dividing, cfg 4, batch 1",
        "odd sides, cfg 4, batch 3",
        "text lengths differ",
        "fewer text tokens than ranks",
        "fewer image tokens than ranks",
    )
}
# On more than four ranks, of which test_parity.py has the other cases with whole weights.
FEW_CASES = ("odd sides, cfg 4, batch 3", "text lengths differ", "fewer image tokens than ranks")


def cases_of(world_size):
    return list(CASES) if world_size <= 4 else list(FEW_CASES)


def sizes_of(heads):
    return dict(
        heads=heads, double_blocks=DOUBLE, single_blocks=SINGLE, context_dim=CONTEXT, pooled_dim=POOLED
    )


class Subjects:
    """Per number of heads the path of the weights and the oracle's latents, made when they are first asked for."""

    def __init__(self, tmp_path_factory):
        self._factory, self._made = tmp_path_factory, {}

    def get(self, heads):
        if heads not in self._made:
            folder = self._factory.mktemp(f"heads{heads}")
            self._made[heads] = oracle_subject(folder, CASES, **sizes_of(heads))[:2]
        return self._made[heads]


def results_by_world_size(subjects, strategies):
    """A function that gives `sample`'s results of all strategies of one number of ranks, by rank, computed once.

    `strategies`: number of ranks -> (heads, strategies).
    """
    cache = {}

    def get(world_size):
        if world_size not in cache:
            heads, wanted = strategies[world_size]
            path, _ = subjects.get(heads)
            cache[world_size] = run_ranks(sample, world_size, path, wanted, cases_of(world_size))
        return cache[world_size]

    return get


def sample(world, path, strategies, cases, engine="native", weight_dtype="auto"):
    """{strategy: case: latent}, the bytes sent under {…: bytes}, the notes under {strategy: notes}, on one rank."""
    jobs, results = PlainJobs(Layouts(world), weight_dtype), {}
    for strategy in strategies:
        for name in cases:
            latent, forward, sent = jobs.run(path, strategy, CASES[name], engine)
            results |= {
                f"{strategy.describe()}: {name}": latent,
                f"{strategy.describe()}: {name}: bytes": sent,
                f"{strategy.describe()}: notes": [forward.engine, *forward.notes],
            }
    return results


def bytes_by_case(strategy, rank, dims, weights=0):
    """{case: bytes that this rank should send}, `weights` of them a step for weights. The closed form is for prompts of
    one length."""
    found = {}
    for name in cases_of(strategy.world_size):
        if name == "text lengths differ":
            continue
        case = CASES[name]
        (height, width), batch = case.noise.shape[-2:], case.noise.shape[0]
        size = {
            "rows": batch * (2 if case.cfg != 1.0 else 1),
            "text": case.positive.context.shape[1],
            "image": -(-height // 2) * -(-width // 2),
        }
        layers, latent = DOUBLE + SINGLE, 16 * height * width
        step = weights + tensor_bytes(strategy, rank, dims, **size)
        step += expected_bytes(
            strategy,
            rank,
            layers=layers,
            apart=DOUBLE,
            hidden=dims.hidden,
            latent_elements=latent,
            patch_channels=dims.hidden,
            **size,
        )
        found[name] = step * (len(case.sigmas) - 1)
    return found
