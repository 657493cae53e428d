"""What tests of sharded and sliced weights share: a tiny Flux per number of heads, and a sampling run on one rank."""

from __future__ import annotations

from flux_requests import CASES as ALL_CASES
from flux_requests import CONTEXT, POOLED
from oracle import oracle_model, oracle_sample
from parallel_backend.engine.factory import make_forward
from parallel_backend.engine.groups import Layouts
from parallel_backend.engine.load import load_under
from parallel_backend.requests import ModelSpec, Placement
from parallel_backend.sampling.denoise import denoise
from ranks import run_ranks
from tiny_flux import write_tiny_flux

DOUBLE, SINGLE = 1, 2
CASES = {
    name: ALL_CASES[name]
    for name in (
        "not dividing, cfg 1, batch 1",
        "dividing, cfg 4, batch 1",
        "odd sides, cfg 4, batch 3",
        "text lengths differ",
        "fewer text tokens than ranks",
        "fewer image tokens than ranks",
    )
}
FEW_CASES = ("odd sides, cfg 4, batch 3", "text lengths differ", "fewer image tokens than ranks")


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
            model = oracle_model(folder, **sizes_of(heads))
            path = write_tiny_flux(folder / "tiny.safetensors", **sizes_of(heads))
            self._made[heads] = str(path), {name: oracle_sample(model, case) for name, case in CASES.items()}
        return self._made[heads]


def results_by_world_size(subjects, strategies):
    """A function that gives `sample`'s results of all strategies of one number of ranks, by rank, computed once.

    `strategies`: number of ranks -> (heads, strategies).
    """
    cache = {}

    def get(world_size):
        if world_size not in cache:
            heads, wanted = strategies[world_size]
            cases = list(CASES) if world_size <= 4 else FEW_CASES
            cache[world_size] = run_ranks(sample, world_size, subjects.get(heads)[0], wanted, cases)
        return cache[world_size]

    return get


def sample(world, path, strategies, cases, engine="native", weight_dtype="auto"):
    """{strategy: case: latent}, the bytes sent under {…: bytes}, the notes under {strategy: notes}, on one rank."""
    layouts, results, loaded = Layouts(world), {}, {}
    for strategy in strategies:
        if strategy.weights not in loaded:
            loaded.clear()
            loaded[strategy.weights] = load_under(
                ModelSpec(path, weight_dtype=weight_dtype), layouts, strategy
            )
        forward = make_forward(loaded[strategy.weights], layouts, Placement(strategy, engine))
        for name in cases:
            before = forward.bytes_sent
            key = f"{strategy.describe()}: {name}"
            results[key] = denoise(forward, CASES[name], lambda i, denoised: None)
            results[f"{key}: bytes"] = forward.bytes_sent - before
        results[f"{strategy.describe()}: notes"] = [forward.engine, *forward.notes]
    return results


def tokens_of(case):
    """(rows, text tokens, image tokens, latent elements) of a request whose prompts have one length."""
    (height, width), batch = case.noise.shape[-2:], case.noise.shape[0]
    rows = batch * (2 if case.cfg != 1.0 else 1)
    return rows, case.positive.context.shape[1], -(-height // 2) * -(-width // 2), 16 * height * width


def difference(latent, expected):
    """Largest difference relative to the largest value."""
    return ((latent - expected).abs().max() / expected.abs().max()).item()
