"""Weight sharding: ranks keep rows of every parameter and gather them to compute; the latent is that of one process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import share_holder
from differences import relative_difference
from parallel_backend.engine import fsdp as sharding
from parallel_backend.engine.comm.groups import Axis, Layouts
from parallel_backend.engine.comm.traffic_counter import Traffic
from parallel_backend.engine.factory import make_forward
from parallel_backend.engine.load import load_under
from parallel_backend.errors import RequestError, StrategyError
from parallel_backend.models.base import ModelPart
from parallel_backend.models.diffusers.checkpoint import inspect_flux
from parallel_backend.models.diffusers.load import load
from parallel_backend.requests import ModelSpec, Placement
from parallel_backend.strategy import ParallelStrategy
from ranks import run_ranks
from spread_weights import (
    DOUBLE,
    SINGLE,
    Subjects,
    bytes_by_case,
    cases_of,
    results_by_world_size,
    sample,
    sizes_of,
)
from tests.closed_forms.weights_traffic import gathered_bytes, sliced_shapes
from tiny_flux import write_tiny_flux

ROOT = Path(__file__).resolve().parents[2]

TOLERANCE = 1e-5


def sharded(**degrees):
    return ParallelStrategy(shard_weights=True, **degrees)


# Heads of the model and strategies per number of ranks.
STRATEGIES = {
    2: (
        2,
        [
            sharded(ulysses_degree=2),
            sharded(ring_degree=2),
            sharded(cfg_degree=2),
            sharded(data_degree=2),
            ParallelStrategy(ulysses_degree=2, offload_weights=True),
        ],
    ),
    3: (2, [sharded(ring_degree=3), sharded(data_degree=3)]),
    4: (
        2,
        [
            sharded(ring_degree=2, ulysses_degree=2),
            sharded(cfg_degree=2, ulysses_degree=2),
            sharded(data_degree=2, cfg_degree=2),
            sharded(data_degree=2, ring_degree=2, device_shares=(1, 2, 1, 2)),
            sharded(cfg_degree=2, tensor_degree=2),
            sharded(ring_degree=2, tensor_degree=2),
        ],
    ),
    6: (2, [sharded(cfg_degree=2, ring_degree=3)]),
    8: (2, [sharded(data_degree=2, cfg_degree=2, ulysses_degree=2)]),
}
ALL = [s for _, group in STRATEGIES.values() for s in group]


@pytest.fixture(scope="module")
def subjects(tmp_path_factory):
    return Subjects(tmp_path_factory)


@pytest.fixture(scope="module")
def results_of(subjects):
    return results_by_world_size(subjects, STRATEGIES)


@pytest.mark.parametrize("strategy", ALL, ids=lambda s: s.describe())
@pytest.mark.xdist_group("engine_sharding")
def test_the_latent_equals_one_process(results_of, subjects, strategy):
    """Also where a rank has fewer rows than another, or none, and so makes fewer model calls."""
    expected = subjects.get(STRATEGIES[strategy.world_size][0])[1]
    for rank, results in enumerate(results_of(strategy.world_size)):
        for name in cases_of(strategy.world_size):
            found = relative_difference(results[f"{strategy.describe()}: {name}"], expected[name])
            assert found <= TOLERANCE, f"rank {rank}, {name}: {found:.2e}"


@pytest.mark.parametrize("strategy", [s for s in ALL if not s.device_shares], ids=lambda s: s.describe())
@pytest.mark.xdist_group("engine_sharding")
def test_bytes_sent_equal_the_closed_form(results_of, subjects, strategy):
    dims = inspect_flux(subjects.get(STRATEGIES[strategy.world_size][0])[0]).dims
    shapes = sliced_shapes(dims, strategy.tensor_degree).values()
    weights = gathered_bytes(shapes, strategy.world_size // strategy.tensor_degree)
    for rank, results in enumerate(results_of(strategy.world_size)):
        for name, expected in bytes_by_case(strategy, rank, dims, weights).items():
            assert results[f"{strategy.describe()}: {name}: bytes"] == expected, f"rank {rank}, {name}"


def twice(world, path, strategy):
    name = "odd sides, cfg 4, batch 3"
    return [sample(world, path, [strategy], [name])[f"{strategy.describe()}: {name}"] for _ in range(2)]


@pytest.mark.parametrize("strategy", [ALL[0], ALL[2]], ids=lambda s: s.describe())
def test_run_to_run_and_rank_to_rank_are_bit_identical(subjects, strategy):
    ranks = run_ranks(twice, strategy.world_size, subjects.get(2)[0], strategy, backend="gloo")
    latents = [latent for rank in ranks for latent in rank]
    assert all(torch.equal(latents[0], other) for other in latents[1:])


@pytest.mark.parametrize("layout", ["bfl", "diffusers"])
@pytest.mark.parametrize(
    ("stored", "wish"),
    [
        (torch.bfloat16, "auto"),
        (torch.bfloat16, "bfloat16"),
        (torch.float8_e4m3fn, "auto"),
        (torch.bfloat16, "float8_e4m3fn"),
    ],
)
def test_every_layout_and_dtype_is_sharded_bit_by_bit(tmp_path, layout, stored, wish):
    """Data parallel ranks compute as one process does, so nothing but the weights could differ."""
    path = str(write_tiny_flux(tmp_path / "x.safetensors", layout=layout, dtype=stored, **sizes_of(2)))
    name = "odd sides, cfg 4, batch 3"
    strategy = ParallelStrategy(data_degree=2)
    whole = run_ranks(sample, 2, path, [strategy], [name], "native", wish, backend="gloo")[0][
        f"data 2: {name}"
    ]
    strategy = strategy.replace(shard_weights=True)
    for results in run_ranks(sample, 2, path, [strategy], [name], "native", wish, backend="gloo"):
        assert torch.equal(results[f"{strategy.describe()}: {name}"], whole)


def shares_of(world, path, strategy, wish):
    model = load_under(ModelSpec(path, weight_dtype=wish), Layouts(world), strategy)
    return {
        name.replace(".inner", ""): (parameter.to_local().clone(), str(parameter.dtype))
        for name, parameter in model.transformer.named_parameters()
    }


@pytest.mark.parametrize("degree", [2, 3])
def test_each_rank_holds_its_rows_of_every_parameter(tmp_path, degree):
    path = write_tiny_flux(tmp_path / "x.safetensors", dtype=torch.bfloat16, **sizes_of(2))
    whole = load(ModelSpec(str(path), weight_dtype="float8_e4m3fn"), torch.device("cpu")).transformer
    ranks = run_ranks(
        shares_of, degree, str(path), sharded(data_degree=degree), "float8_e4m3fn", backend="gloo"
    )
    for name, parameter in whole.named_parameters():
        found = [rank[name.replace(".inner", "")] for rank in ranks]
        assert {dtype for _, dtype in found} == {str(parameter.dtype)}
        assert torch.equal(torch.cat([share for share, _ in found]).float(), parameter.float())
        assert max(len(share) for share, _ in found) == -(-len(parameter) // degree)


def sample_with_shares_exchanged(world, path):
    """The negative control: each rank fills in the other's rows."""
    honest = sharding._share
    sharding._share = lambda rows, axis: honest(rows, Axis(axis.ranks, 1 - axis.index, axis.group))
    return sample(world, path, [sharded(cfg_degree=2)], ["not dividing, cfg 1, batch 1"])


def test_exchanged_shares_are_seen(subjects):
    path, expected = subjects.get(2)
    name = "not dividing, cfg 1, batch 1"
    results = run_ranks(sample_with_shares_exchanged, 2, path, backend="gloo")[0]
    assert relative_difference(results[f"CFG 2, weights sharded: {name}"], expected[name]) > 1000 * TOLERANCE


def order_of_gathers(world, path):
    layouts = Layouts(world)
    model = load_under(ModelSpec(path), layouts, sharded(cfg_degree=2))
    gathered = []
    honest = sharding._CountedGather.__call__

    def noted(self, output_tensor, input_tensor, group, async_op=False):
        gathered.append(input_tensor.numel())
        return honest(self, output_tensor, input_tensor, group, async_op)

    sharding._CountedGather.__call__ = noted
    share_holder.call(model, make_forward(model, layouts, Placement(sharded(cfg_degree=2))))
    return gathered


def test_a_rank_without_rows_gathers_in_the_same_order(tmp_path):
    path = write_tiny_flux(tmp_path / "x.safetensors", **sizes_of(2))
    compute_options, idle = run_ranks(order_of_gathers, 2, str(path), backend="gloo")
    assert compute_options == idle and len(compute_options) == 1 + DOUBLE + SINGLE


def alone(world, path):
    """A group of one, as a single device has that offloads."""
    gather = sharding.Sharding(Axis((0,), 0, None), world.device, Traffic(), offload=False)
    model = load(ModelSpec(path), world.device, ModelPart(sharding=gather))
    whole = load(ModelSpec(path), world.device)
    layouts, outputs = Layouts(world), []
    for held in (model, whole):
        torch.manual_seed(0)
        outputs.append(share_holder.call(held, make_forward(held, layouts, Placement())))
    dist.destroy_process_group()
    return outputs


def test_a_group_of_one_rank_works(tmp_path):
    path = write_tiny_flux(tmp_path / "x.safetensors", **sizes_of(2))
    (outputs,) = run_ranks(alone, 1, str(path), backend="gloo")
    assert relative_difference(*outputs) <= TOLERANCE


@pytest.mark.xdist_group("engine_sharding")
def test_offload_on_the_cpu_is_said_to_change_nothing(results_of):
    strategy = STRATEGIES[2][1][-1]
    for results in results_of(2):
        engine, note = results[f"{strategy.describe()}: notes"]
        assert engine == "native"
        assert note == "offload_weights changes nothing on the CPU: weights are in host memory anyway"


def refused(world, path, strategy):
    try:
        load_under(ModelSpec(path), Layouts(world), strategy)
    except StrategyError as error:
        return str(error)


def test_a_pipeline_with_sharded_weights_is_refused_on_every_rank(subjects):
    strategy = sharded(pipefusion_degree=2)
    for message in run_ranks(refused, 2, subjects.get(2)[0], strategy, backend="gloo"):
        assert "pipefusion_degree 2 with shard_weights" in message


def test_an_old_torch_is_named(monkeypatch):
    monkeypatch.delattr(sharding.FSDPModule, "set_custom_all_gather")
    with pytest.raises(RequestError, match=r"needs torch 2\.9 or newer and this is .*turn shard_weights"):
        sharding.Sharding(Axis((0,), 0, None), torch.device("cpu"), Traffic(), offload=False)


# Memory: no block is more than 8 % of the file.
LARGE = {"heads": 2, "double_blocks": 2, "single_blocks": 24}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("memory")
    small = write_tiny_flux(folder / "small.safetensors", heads=2)
    return str(small), str(write_tiny_flux(folder / "large.safetensors", **LARGE))


def gained(files, tmp_path, strategies):
    """By strategy: what each rank gained in memory of its own, as a share of the file."""
    size = Path(files[1]).stat().st_size
    assert size > 100e6
    holder = ROOT / "tests" / "support" / "share_holder.py"
    ranks = [
        subprocess.Popen(
            [
                sys.executable,
                str(holder),
                str(rank),
                str(tmp_path / "store"),
                *files,
                json.dumps(strategies),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        found = [[json.loads(rank.stdout.readline()) for rank in ranks] for _ in strategies]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    return [[{name: value / size for name, value in rank.items()} for rank in of_ranks] for of_ranks in found]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_rank_keeps_no_more_than_its_part(files, tmp_path):
    shared, sliced = {"ulysses_degree": 2, "shard_weights": True}, {"tensor_degree": 2}
    found = gained(files, tmp_path, [shared, sliced])
    print(found)
    for rank in (rank for of_ranks in found for rank in of_ranks):
        assert max(rank["loaded"], rank["held"]) <= 0.5 + 0.1
        # While it computes also a block that arrives and one that is in use, 8 % each, and what the heap leaves unused.
        assert rank["peak"] <= 0.5 + 0.45
    assert (
        min(rank["loaded"] for rank in found[0]) > 0.9 * 0.5
    )  # the slices of the other lie in the mapped file
