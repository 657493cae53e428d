"""Tensor parallelism: every rank computes with slices of the layers, and the latent is that of one process."""

from __future__ import annotations

import pytest
import torch

from differences import relative_difference
from mapped_files import mapped_ranges
from parallel_backend.engine.comm.groups import Layouts
from parallel_backend.engine.load import load_under
from parallel_backend.errors import StrategyError
from parallel_backend.models.base import ModelPart, Slices
from parallel_backend.models.diffusers.checkpoint import inspect_flux
from parallel_backend.models.diffusers.load import load
from parallel_backend.requests import ModelSpec
from parallel_backend.strategy import ParallelStrategy
from ranks import run_ranks
from spread_weights import (
    SINGLE,
    Subjects,
    bytes_by_case,
    cases_of,
    results_by_world_size,
    sample,
    sizes_of,
)
from tests.closed_forms.weights_traffic import sliced_shapes
from tiny_flux import write_tiny_flux

TOLERANCE = 1e-5


def tensor(degree, **more):
    return ParallelStrategy(tensor_degree=degree, **more)


# Heads of the model and strategies per number of ranks.
STRATEGIES = {
    2: (2, [tensor(2)]),
    3: (3, [tensor(3)]),
    4: (
        4,
        [
            tensor(4),
            tensor(2, ulysses_degree=2),
            tensor(2, ring_degree=2),
            tensor(2, cfg_degree=2),
            tensor(2, data_degree=2),
            tensor(2, ring_degree=2, device_shares=(3, 3, 1, 1)),
        ],
    ),
    6: (2, [tensor(2, ring_degree=3)]),
    8: (2, [tensor(2, cfg_degree=2, ring_degree=2)]),
}
ALL = [s for _, group in STRATEGIES.values() for s in group]


@pytest.fixture(scope="module")
def subjects(tmp_path_factory):
    return Subjects(tmp_path_factory)


@pytest.fixture(scope="module")
def results_of(subjects):
    return results_by_world_size(subjects, STRATEGIES)


@pytest.mark.parametrize("strategy", ALL, ids=lambda s: s.describe())
@pytest.mark.xdist_group("engine_tensor_parallel")
def test_the_latent_equals_one_process(results_of, subjects, strategy):
    expected = subjects.get(STRATEGIES[strategy.world_size][0])[1]
    for rank, results in enumerate(results_of(strategy.world_size)):
        for name in cases_of(strategy.world_size):
            found = relative_difference(results[f"{strategy.describe()}: {name}"], expected[name])
            assert found <= TOLERANCE, f"rank {rank}, {name}: {found:.2e}"


@pytest.mark.parametrize("strategy", [s for s in ALL if not s.device_shares], ids=lambda s: s.describe())
@pytest.mark.xdist_group("engine_tensor_parallel")
def test_bytes_sent_equal_the_closed_form(results_of, subjects, strategy):
    dims = inspect_flux(subjects.get(STRATEGIES[strategy.world_size][0])[0]).dims
    for rank, results in enumerate(results_of(strategy.world_size)):
        for name, expected in bytes_by_case(strategy, rank, dims).items():
            assert results[f"{strategy.describe()}: {name}: bytes"] == expected, f"rank {rank}, {name}"


def twice(world, path, strategy):
    name = "odd sides, cfg 4, batch 3"
    return [sample(world, path, [strategy], [name])[f"{strategy.describe()}: {name}"] for _ in range(2)]


@pytest.mark.parametrize("strategy", [tensor(2), tensor(2, ulysses_degree=2)], ids=lambda s: s.describe())
def test_run_to_run_and_rank_to_rank_are_bit_identical(subjects, strategy):
    ranks = run_ranks(twice, strategy.world_size, subjects.get(4)[0], strategy)
    latents = [latent for rank in ranks for latent in rank]
    assert all(torch.equal(latents[0], other) for other in latents[1:])


@pytest.mark.parametrize("layout", ["bfl", "diffusers"])
@pytest.mark.parametrize(
    ("stored", "wish", "allowed"),
    [
        (torch.bfloat16, "auto", TOLERANCE),
        (torch.float8_e4m3fn, "float32", TOLERANCE),
        # bf16 arithmetic, whose sums are rounded on each rank: against one process that rounds once.
        (torch.float8_e4m3fn, "auto", 0.02),
        (torch.bfloat16, "float8_e4m3fn", 0.02),
    ],
)
def test_every_layout_and_dtype_is_sliced_alike(tmp_path, layout, stored, wish, allowed):
    path = str(write_tiny_flux(tmp_path / "x.safetensors", layout=layout, dtype=stored, **sizes_of(2)))
    name = "odd sides, cfg 4, batch 3"
    (whole,) = run_ranks(sample, 1, path, [ParallelStrategy()], [name], "native", wish)
    expected = whole[f"one device: {name}"]
    for results in run_ranks(sample, 2, path, [tensor(2)], [name], "native", wish):
        assert relative_difference(results[f"tensor 2: {name}"], expected) <= allowed


def parameters_of(world, path, wish):
    model = load_under(ModelSpec(path, weight_dtype=wish), Layouts(world), tensor(2))
    named = dict(model.module.transformer.named_parameters())
    heads = {m.heads for m in model.module.transformer.modules() if hasattr(m, "to_q")}
    return {
        "bytes": sum(p.numel() * p.element_size() for p in named.values()),
        "shapes": {name.replace(".inner", ""): list(p.shape) for name, p in named.items()},
        "dtypes": sorted({str(p.dtype) for n, p in named.items() if "transformer_blocks" in n}),
        "heads": sorted(heads),
    }


def test_a_rank_holds_slices_in_the_storage_dtype(tmp_path):
    path = write_tiny_flux(tmp_path / "x.safetensors", dtype=torch.bfloat16, **sizes_of(2))
    dims = inspect_flux(path).dims
    for index, rank in enumerate(run_ranks(parameters_of, 2, str(path), "float8_e4m3fn")):
        assert rank["shapes"] == {name: list(shape) for name, shape in sliced_shapes(dims, 2, index).items()}
        assert rank["dtypes"] == ["torch.bfloat16", "torch.float8_e4m3fn"]
        assert rank["heads"] == [1]


def test_a_rank_holds_half_of_the_weights_of_all_blocks(tmp_path):
    path = write_tiny_flux(tmp_path / "x.safetensors", **sizes_of(2))
    whole = inspect_flux(path).tensor_bytes
    for rank in run_ranks(parameters_of, 2, str(path), "auto"):
        # Whole on every rank are the embedders and the last layer, 8 h² of the 66 h² of this tiny model.
        assert rank["bytes"] < (0.5 + 0.5 * 8.6 / 66) * whole


def test_slices_are_views_of_the_mapped_file_wherever_they_lie_in_one_place(tmp_path):
    path = write_tiny_flux(tmp_path / "x.safetensors", **sizes_of(2))
    slices = Slices(2, 1, lambda partial: partial, lambda columns: columns)
    model = load(ModelSpec(str(path)), torch.device("cpu"), ModelPart(slices=slices))
    ranges = mapped_ranges(path)
    copies = {
        name
        for name, parameter in model.module.transformer.named_parameters()
        if ".norm_" not in name and not any(b <= parameter.data_ptr() < e for b, e in ranges)
    }
    assert copies == {f"single_transformer_blocks.{i}.proj_out.weight" for i in range(SINGLE)}


def sample_without_adding_up(world, path):
    """The negative control: a rank that keeps its own partial results."""
    from parallel_backend.engine import tensor_parallel

    tensor_parallel.all_reduce = lambda partial, axis, traffic: partial
    return sample(world, path, [tensor(2)], ["not dividing, cfg 1, batch 1"])


def test_a_rank_that_does_not_add_up_is_seen(subjects):
    path, expected = subjects.get(2)
    results = run_ranks(sample_without_adding_up, 2, path)[0]
    name = "not dividing, cfg 1, batch 1"
    assert relative_difference(results[f"tensor 2: {name}"], expected[name]) > 1000 * TOLERANCE


def test_xfuser_falls_back_to_native_by_name(subjects):
    path, expected = subjects.get(4)
    name = "odd sides, cfg 4, batch 3"
    strategy = tensor(2, ulysses_degree=2)
    for results in run_ranks(sample, 4, path, [strategy], [name], "xfuser", backend="gloo"):
        engine, note = results[f"{strategy.describe()}: notes"]
        assert engine == "native"
        assert note.startswith(
            "engine xfuser fell back to native: its tensor parallelism splits the feed-forward"
        )
        assert relative_difference(results[f"{strategy.describe()}: {name}"], expected[name]) <= TOLERANCE


def refused(world, path):
    try:
        load_under(ModelSpec(path), Layouts(world), tensor(2))
    except StrategyError as error:
        return str(error)


def test_heads_that_do_not_divide_are_refused_on_every_rank(subjects):
    for message in run_ranks(refused, 2, subjects.get(3)[0]):
        assert "does not divide the 3 attention heads of tiny.safetensors" in message
        assert "nearest valid setting is tensor_degree 1" in message
