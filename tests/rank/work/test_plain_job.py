"""Every strategy gives the latent of one process: in fp32, the max abs difference is <= 1e-5 x max|latent|."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import pytest
import torch

from flux_requests import BLOCKS, TOLERANCE
from flux_requests import CASES_OF_TWO_STEPS as CASES
from nccl_semantics import NCCL_STREAMS
from oracle import oracle_subject
from parallel_backend.engine.comm.groups import Layouts
from parallel_backend.strategy import ParallelStrategy
from plain_jobs import PlainJobs
from ranks import run_ranks
from tests.closed_forms.traffic import expected_bytes


def heads_of(strategy):
    """Returns the number of heads of the strategy's model: 4 for Ulysses without CFG or replicas, else 2."""
    return 4 if strategy.ulysses_degree > 1 and strategy.row_degree == 1 else 2


STRATEGIES = {
    1: [ParallelStrategy()],
    2: [
        ParallelStrategy(ulysses_degree=2),
        ParallelStrategy(ring_degree=2),
        ParallelStrategy(cfg_degree=2),
        ParallelStrategy(ulysses_degree=2, sends_tokens=True),
        ParallelStrategy(data_degree=2),
    ],
    3: [ParallelStrategy(ring_degree=3), ParallelStrategy(data_degree=3)],
    4: [
        ParallelStrategy(cfg_degree=2, ulysses_degree=2),
        ParallelStrategy(data_degree=2, cfg_degree=2),
    ],
}
FEW_CASES = ("odd sides, cfg 4, batch 3", "text lengths differ", "fewer image tokens than ranks")
# A job knows no engine: tests/engine/attention/test_xfuser_of_modules.py has xfuser's strategies.
ENGINES = {
    "native": (STRATEGIES, list(CASES)),
    "xfuser": ({2: STRATEGIES[2][:2]}, [*FEW_CASES, "fewer text tokens than ranks"]),
}
# Only native has these: unequal shares of tokens, sharded or offloaded weights, and products of three axes.
OTHERS = {
    2: [
        ParallelStrategy(ulysses_degree=2, device_shares=(24, 16)),
        ParallelStrategy(ring_degree=2, device_shares=(1, 9)),
        ParallelStrategy(ring_degree=2, offload_weights=True),
    ],
    4: [
        ParallelStrategy(ring_degree=2, ulysses_degree=2, device_shares=(4, 1, 2, 1)),
        ParallelStrategy(cfg_degree=2, ulysses_degree=2, device_shares=(3, 1, 1, 2)),
        ParallelStrategy(data_degree=2, cfg_degree=2, shard_weights=True),
    ],
    6: [
        ParallelStrategy(cfg_degree=2, ring_degree=3),
        ParallelStrategy(data_degree=3, ulysses_degree=2, shard_weights=True),
    ],
    8: [
        ParallelStrategy(cfg_degree=2, ring_degree=2, ulysses_degree=2),
        ParallelStrategy(data_degree=2, cfg_degree=2, pipefusion_degree=2, warmup_steps=2),
        ParallelStrategy(data_degree=2, ring_degree=2, tensor_degree=2),
    ],
}


def cases_of(engine, strategy):
    """Returns the names of the cases: few for products of axes, since each axis alone has them all."""
    split = sum(degree > 1 for degree in (strategy.row_degree, strategy.ring_degree, strategy.ulysses_degree))
    rows_twice = strategy.data_degree > 1 < strategy.cfg_degree
    return FEW_CASES if split > 1 or rows_twice else ENGINES[engine][1]


def sample(world, paths, strategies, engine):
    """Returns this rank's {"strategy: case": (latent, engine that ran, bytes sent)}, all on the same loaded weights."""
    jobs, results = PlainJobs(Layouts(world)), {}
    for strategy in strategies:
        for name in FEW_CASES if strategy in OTHERS.get(world.world_size, ()) else cases_of(engine, strategy):
            latent, forward, sent = jobs.run(paths[heads_of(strategy)], strategy, CASES[name], engine)
            results[f"{strategy.describe()}: {name}"] = (latent, forward.engine, sent)
    return results


@pytest.fixture(scope="module")
def subjects(tmp_path_factory):
    """Returns ({heads: path of the weights}, {heads: {case: the oracle's latent}}) of two models."""
    paths, expected = {}, {}
    for heads in (2, 4):
        folder = tmp_path_factory.mktemp("parity")
        sizes = dict(heads=heads, double_blocks=BLOCKS, single_blocks=BLOCKS)
        paths[heads], expected[heads], _ = oracle_subject(folder, CASES, **sizes)
    return paths, expected


@pytest.fixture(scope="module")
def subject(subjects):
    """Returns (path of the weights, {case: the oracle's latent}) of the larger model."""
    return subjects[0][4], subjects[1][4]


@pytest.fixture(scope="module")
def all_results(subjects):
    """Returns get(engine, world_size), which computes the results of every strategy once."""
    cache = {}

    def get(engine, world_size):
        if (engine, world_size) not in cache:
            strategies = ENGINES[engine][0][world_size]
            cache[engine, world_size] = run_ranks(
                sample, world_size, subjects[0], strategies, engine, backend="gloo"
            )
        return cache[engine, world_size]

    return get


@pytest.mark.parametrize(
    ("engine", "strategy", "case"),
    [
        pytest.param(engine, strategy, case, id=f"{engine}-{strategy.describe()}-{case}")
        for engine, (strategies, _) in ENGINES.items()
        for strategy in chain(*strategies.values())
        for case in cases_of(engine, strategy)
    ],
)
@pytest.mark.xdist_group("engine_parity")
def test_the_latent_equals_one_process(all_results, subjects, engine, strategy, case):
    expected = subjects[1][heads_of(strategy)][case]
    for rank, results in enumerate(all_results(engine, strategy.world_size)):
        latent, ran, _ = results[f"{strategy.describe()}: {case}"]
        difference = (latent - expected).abs().max().item() / expected.abs().max().item()
        assert ran == engine
        assert difference <= TOLERANCE, f"rank {rank}: {difference:.2e}"


@pytest.mark.xdist_group("engine_parity")
@pytest.mark.parametrize("strategy", [*chain(*STRATEGIES.values())], ids=lambda s: s.describe())
def test_bytes_sent_equal_the_closed_form(all_results, strategy):
    for rank, results in enumerate(all_results("native", strategy.world_size)):
        for name in cases_of("native", strategy):
            if name == "text lengths differ":
                continue  # the closed form is for rows of one length
            case = CASES[name]
            (height, width), batch = case.noise.shape[-2:], case.noise.shape[0]
            per_step = expected_bytes(
                strategy,
                rank,
                rows=batch * (2 if case.cfg != 1.0 else 1),
                text=case.positive.context.shape[1],
                image=-(-height // 2) * -(-width // 2),
                layers=2 * BLOCKS,
                apart=BLOCKS,
                hidden=heads_of(strategy) * 128,
                latent_elements=16 * height * width,
                patch_channels=heads_of(strategy) * 128,  # tokens are gathered before the last layer
            )
            sent = results[f"{strategy.describe()}: {name}"][2]
            assert sent == per_step * (len(case.sigmas) - 1), f"rank {rank}, {name}"


@pytest.mark.parametrize("world_size", OTHERS)
def test_uneven_shares_and_products_of_axes_equal_one_process(subjects, world_size):
    paths, expected = subjects
    strategies = OTHERS[world_size]
    for results in run_ranks(sample, world_size, paths, strategies, "native", backend=NCCL_STREAMS):
        for strategy in strategies:
            for case in FEW_CASES:
                wanted = expected[heads_of(strategy)][case]
                latent, _, _ = results[f"{strategy.describe()}: {case}"]
                difference = (latent - wanted).abs().max() / wanted.abs().max()
                assert difference <= TOLERANCE, f"{strategy.describe()}, {case}: {difference:.2e}"


def notes_of(world, path, strategies):
    jobs, case = PlainJobs(Layouts(world)), CASES[FEW_CASES[0]]
    forwards = [jobs.run(path, strategy, case, "xfuser")[1] for strategy in strategies]
    return [(forward.engine, " ".join(forward.notes)) for forward in forwards]


def test_xfuser_leaves_unequal_shares_and_whole_images_to_native_and_says_so(subject):
    strategies = [ParallelStrategy(ring_degree=2, device_shares=(1, 9)), ParallelStrategy(cfg_degree=2)]
    for uneven, rows in run_ranks(notes_of, 2, subject[0], strategies, backend="gloo"):
        assert uneven[0] == rows[0] == "native" and "fell back to native" in uneven[1]
        assert "fell back to native: CFG 2 splits no tokens" in rows[1]


def test_images_of_different_seeds_come_out_of_a_batch_as_they_do_alone(subject, tmp_path):
    """Two replicas split five seeds: one computes three images, the other two."""
    case = CASES["dividing, cfg 1, batch 1"]
    noises = [torch.randn(1, 16, 8, 16, generator=torch.Generator().manual_seed(seed)) for seed in range(5)]
    requests = [replace(case, noise=noise) for noise in noises]
    batch = replace(case, noise=torch.cat(noises))
    (alone,) = run_ranks(latents_of, 1, subject[0], ParallelStrategy(), requests)
    for (together,) in run_ranks(latents_of, 2, subject[0], ParallelStrategy(data_degree=2), [batch]):
        assert (together - torch.cat(alone)).abs().max() <= TOLERANCE * together.abs().max()


def latents_of(world, path, strategy, requests):
    jobs = PlainJobs(Layouts(world))
    return [jobs.run(path, strategy, request)[0] for request in requests]


def sample_without_a_neighbours_keys(world, path):
    """Samples with a ring that forgets what it received: the negative control."""
    from parallel_backend.engine.attention import sequence

    def forgetful(mine, sizes, axis, traffic):
        yield mine

    sequence.ring_shares = forgetful
    strategy = ParallelStrategy(ring_degree=2)
    return PlainJobs(Layouts(world)).run(path, strategy, CASES["odd sides, cfg 1, batch 1"])[0]


def test_dropping_a_neighbours_keys_is_seen(subject):
    expected = subject[1]["odd sides, cfg 1, batch 1"]
    latent = run_ranks(sample_without_a_neighbours_keys, 2, subject[0], backend="gloo")[0]
    assert (latent - expected).abs().max() > 1000 * TOLERANCE * expected.abs().max()


IN_TURN = ("not dividing, cfg 4, batch 1", *["odd sides, cfg 1, batch 1"] * 3)


def sample_after_another_strategy_with_idle_ranks(world, path):
    """Alternates two strategies on loaded weights; the third request has one row for two groups of ranks."""
    jobs = PlainJobs(Layouts(world))
    pair, row = ParallelStrategy(cfg_degree=2, ulysses_degree=2), ParallelStrategy(ulysses_degree=4)
    return [
        jobs.run(path, strategy, CASES[name], "xfuser")[0]
        for strategy, name in zip((pair, row, pair, row), IN_TURN, strict=True)
    ]


def test_strategies_take_turns_on_xfuser_also_where_ranks_idle(subject):
    results = run_ranks(
        sample_after_another_strategy_with_idle_ranks, 4, subject[0], timeout=90, backend="gloo"
    )
    for latents in results:
        for latent, name in zip(latents, IN_TURN, strict=True):
            expected = subject[1][name]
            assert (latent - expected).abs().max() <= TOLERANCE * expected.abs().max()
