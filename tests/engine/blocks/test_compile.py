"""Compiled blocks give the same as uncompiled ones under every strategy, from few graphs that are compiled once."""

from __future__ import annotations

import pytest
import torch

from differences import relative_difference
from flux_requests import CASES_OF_TWO_STEPS, CONTEXT, POOLED, request
from nccl_semantics import NCCL_STREAMS
from parallel_backend.engine.blocks import compile as compiling
from parallel_backend.engine.comm.groups import Layouts
from parallel_backend.errors import RequestError
from parallel_backend.options import COMPILE_BACKEND, ComputeOptions
from parallel_backend.requests import ModelSpec, Placement
from parallel_backend.sidecar.sidecar import Sidecar
from parallel_backend.strategy import ParallelStrategy
from plain_jobs import PlainJobs, run_plain
from ranks import run_ranks
from tiny_flux import write_tiny_flux

TOLERANCE = 1e-5
ONE_DEVICE = ParallelStrategy()
PIPEFUSION = ParallelStrategy(pipefusion_degree=2, num_pipeline_patch=2)
STRATEGIES = (
    PIPEFUSION,
    ParallelStrategy(ulysses_degree=2, head_groups=2),
    ParallelStrategy(ring_degree=2),
    ParallelStrategy(tensor_degree=2),
    ParallelStrategy(cfg_degree=2, shard_weights=True),
)
CASE = CASES_OF_TWO_STEPS["not dividing, cfg 4, batch 1"]


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    sizes = dict(heads=4, double_blocks=1, single_blocks=2, context_dim=CONTEXT, pooled_dim=POOLED)
    return str(write_tiny_flux(tmp_path_factory.mktemp("compiling") / "tiny.safetensors", **sizes))


@pytest.fixture
def without_inductor(monkeypatch):
    """The backend eager: torch traces blocks and guards the graphs, and runs the graphs without compiling kernels."""
    monkeypatch.setenv(COMPILE_BACKEND, "eager")


def both_ways(jobs, path, strategy=ONE_DEVICE):
    """Returns the forwards [with uncompiled blocks, with compiled blocks]."""
    return [
        jobs.forward(path, Placement(strategy, compute_options=ComputeOptions(mode)))
        for mode in ("off", "blocks")
    ]


def sample_both_ways(world, path, strategies):
    """Returns {strategy: (difference of compiled from uncompiled blocks, graphs, uncompiled calls)}."""
    jobs, results = PlainJobs(Layouts(world)), {}
    for strategy in strategies:
        plain, compiled = both_ways(jobs, path, strategy)
        off = relative_difference(run_plain(compiled, CASE), run_plain(plain, CASE))
        done = compiling.compiler().take()
        results[strategy.describe()] = (off, done.graphs, done.uncompiled)
    return results


def test_they_give_the_same_under_every_strategy_and_compile_once(weights, without_inductor):
    for results in run_ranks(sample_both_ways, 2, weights, STRATEGIES, backend=NCCL_STREAMS):
        for strategy, (off, graphs, uncompiled) in results.items():
            assert off <= TOLERANCE, f"{strategy}: {off}"
            assert uncompiled == 0, strategy
            # Two classes of blocks; each has one version for the first size and one or two for all other sizes.
            assert graphs <= 6, f"{strategy}: {graphs}"
        assert results[PIPEFUSION.describe()][1] > 0
        # Exchanges are inside an operator, so strategies that split only tokens share the compiled graphs.
        assert results["Ring 2"][1] == 0


def sample_many_sizes(world, path):
    """Returns [graphs, uncompiled calls] for many sizes and for one beyond the limit, that one's difference and notes,
    and [uncompiled calls] for the first size again."""
    plain, compiled = both_ways(PlainJobs(Layouts(world)), path)
    compiler, sizes = compiling.compiler(), [(2 * n, 30 - 2 * n) for n in range(4, 12)]
    for n, size in enumerate(sizes):
        run_plain(compiled, request(size, 1.0, 1, positive_tokens=5 + n, steps=1))
    many = compiler.take()
    torch._dynamo.config.recompile_limit = many.graphs // 2
    one_more = request((8, 12), 4.0, 2, steps=1)
    off = relative_difference(run_plain(compiled, one_more), run_plain(plain, one_more))
    notes, beyond = compiler.notes(), compiler.take()
    again = request(sizes[0], 1.0, 1, positive_tokens=5, steps=1)
    run_plain(compiled, again)
    return [
        [many.graphs, many.uncompiled],
        [beyond.graphs, beyond.uncompiled],
        off,
        notes,
        [compiler.take().uncompiled],
    ]


def test_many_sizes_share_few_versions_and_beyond_the_most_blocks_run_uncompiled_and_it_is_said(
    weights, without_inductor
):
    ((many, beyond, off, notes, again),) = run_ranks(sample_many_sizes, 1, weights)
    assert many == [4, 0]
    assert beyond == [0, 3] and off <= TOLERANCE  # one double block, two single ones
    assert "some blocks ran uncompiled" in notes[0] and "set compile to off" in notes[0]
    assert again == [0]  # the compiled graphs stay in use


def sample_with_a_compiler_that_fails(world, path):
    def fails(graph, inputs):
        raise OSError("cc1plus: no space left on device\nand more")

    compiler = compiling.Compiler(fails)
    compiling.compiler = lambda: compiler
    plain, compiled = both_ways(jobs := PlainJobs(Layouts(world)), path)
    off = relative_difference(run_plain(compiled, CASE), run_plain(plain, CASE))
    notes = compiler.notes()

    def does_not_start():
        raise RuntimeError("torch.compile is not supported on Python 3.99+")

    compiling.compiler = does_not_start
    options = ComputeOptions("blocks", attention="torch")  # makes a new forward
    notes += jobs.forward(path, Placement(compute_options=options)).notes
    return [off, notes]


def test_where_the_compiler_fails_blocks_run_uncompiled_and_the_reason_is_said(weights, without_inductor):
    ((off, notes),) = run_ranks(sample_with_a_compiler_that_fails, 1, weights)
    assert off <= TOLERANCE
    assert notes == [
        "torch.compile failed, so blocks ran uncompiled: OSError: cc1plus: no space left on device; set compile to off",
        "blocks ran uncompiled: torch.compile does not start (RuntimeError: torch.compile is not supported on Python "
        "3.99+); set compile to off",
    ]


def test_without_a_c_compiler_blocks_run_uncompiled_and_the_remedy_is_said(weights, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(torch, "__file__", "/usr/lib/torch/__init__.py")
    assert compiling.why_not("cpu") is None
    with monkeypatch.context() as patched:
        patched.setattr(torch, "__file__", "/home/my files/torch/__init__.py")
        assert "a space in its name" in compiling.why_not("cpu")
    monkeypatch.setenv("PATH", "")
    assert "install g++" in compiling.why_not("cpu")
    ((notes, compiles),) = run_ranks(notes_without_compiler, 1, weights)
    assert not compiles
    assert notes == [
        "blocks ran uncompiled: there is no C++ compiler (g++); install g++, or set compile to off"
    ]


def notes_without_compiler(world, path):
    ran = PlainJobs(Layouts(world)).forward(path, Placement(compute_options=ComputeOptions("blocks")))
    return [ran.notes, ran.compiles]


@pytest.mark.real_start  # torch reads the number of compile workers on import
def test_a_sidecar_compiles_with_inductor_says_so_and_leaves_nothing_behind(
    weights, tmp_path, monkeypatch, no_leaks
):
    """Compiles with inductor on one rank, which takes one core 15 s."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "2")
    monkeypatch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "0")  # plain C++ compiles faster
    spec, case, said = ModelSpec(weights), request((8, 12), 1.0, 1), []
    plain, compiled = (Placement(compute_options=ComputeOptions(mode)) for mode in ("off", "blocks"))
    with_ranks = Sidecar(("cpu:0",))
    try:
        expected = with_ranks.sample(spec, case, plain)
        first = with_ranks.sample(spec, case, compiled, on_phase=said.append)
        second = with_ranks.sample(spec, case, compiled, on_phase=said.append)
        assert relative_difference(first.latent, expected.latent) <= TOLERANCE
        assert torch.equal(first.latent, second.latent)
        if reason := compiling.why_not("cpu"):
            assert first.info.notes == (f"blocks ran uncompiled: {reason}",)
            return
        assert first.info.compiled.graphs == 2 and first.info.compiled.seconds > 0
        assert second.info.compiled.graphs == 0 == second.info.compiled.uncompiled
        assert expected.info.compiled is None and first.info.kernel == "torch"
        assert [text for text in said if "compiling" in text] == [
            "compiling for a latent of 16 x 8 x 12; this step takes longer"
        ]
        assert first.info.notes == second.info.notes == ()
        # The ranks refuse what cannot run here, and stay alive.
        pids = with_ranks.pids
        with pytest.raises(RequestError, match="attention sage cannot run on cpu"):
            with_ranks.sample(spec, case, Placement(compute_options=ComputeOptions(attention="sage")))
        assert with_ranks.pids == pids
    finally:
        with_ranks.stop()
