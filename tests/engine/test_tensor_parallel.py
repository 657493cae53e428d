"""Slices of layers: how they are read from a file, what a rank holds, what is refused, and their operators.

test_adapted_flux.py tests that they give the answer of whole layers, and how much they send."""

from __future__ import annotations

import gc

import pytest
import torch

from adapted_flux import CALLS
from differences import relative_difference
from mapped_files import is_mapped
from parallel_backend.engine import tensor_parallel
from parallel_backend.engine.comm.groups import Axis, Layouts
from parallel_backend.engine.load import load_under
from parallel_backend.engine.module_forward import make_module_forward
from parallel_backend.errors import StrategyError
from parallel_backend.models.base import ModelPart, Slices
from parallel_backend.models.diffusers.checkpoint import inspect_flux
from parallel_backend.models.diffusers.load import load
from parallel_backend.requests import STAY, ModelSpec, ModuleCall, Placement
from parallel_backend.strategy import ParallelStrategy
from ranks import run_ranks
from tests.closed_forms.weights_traffic import sliced_shapes
from tiny_flux import write_tiny_flux

TOLERANCE = 1e-5
TENSOR_2 = ParallelStrategy(tensor_degree=2)
SINGLE = 2
SIZES = dict(heads=2, double_blocks=1, single_blocks=SINGLE, context_dim=48, pooled_dim=32)


@torch.inference_mode()
def answer(world, path, strategy, wish="auto", engine="native", adds_up=True):
    """Returns (the answer to a call, notes). `adds_up`: False makes each rank keep its local partial results."""
    if not adds_up:
        tensor_parallel.all_reduce = lambda partial, axis: partial
    layouts = Layouts(world)
    model = load_under(ModelSpec(path, weight_dtype=wish), layouts, strategy)
    forward = make_module_forward(model, layouts, Placement(strategy, engine))
    args, kwargs = CALLS["odd sides"]()
    return forward(ModuleCall(args, kwargs, len(args[0]), STAY)), forward.notes


def answers(world, paths, strategy, wish):
    return [answer(world, path, strategy, wish)[0] for path in paths]


@pytest.mark.parametrize(
    ("stored", "wish", "allowed"),
    [
        (torch.bfloat16, "auto", TOLERANCE),
        (torch.float8_e4m3fn, "float32", TOLERANCE),
        # bf16 arithmetic: each rank rounds its partial sums, and the one process rounds once.
        (torch.float8_e4m3fn, "auto", 0.02),
        (torch.bfloat16, "float8_e4m3fn", 0.02),
    ],
)
def test_every_layout_and_dtype_is_sliced_alike(tmp_path, stored, wish, allowed):
    paths = [
        str(write_tiny_flux(tmp_path / f"{layout}.safetensors", layout=layout, dtype=stored, **SIZES))
        for layout in ("bfl", "diffusers")
    ]
    (expected,) = run_ranks(answers, 1, paths, ParallelStrategy(), wish)
    for found in run_ranks(answers, 2, paths, TENSOR_2, wish):
        assert max(map(relative_difference, found, expected)) <= allowed


def parameters_of(world, path):
    model = load_under(ModelSpec(path, weight_dtype="float8_e4m3fn"), Layouts(world), TENSOR_2)
    named = dict(model.module.transformer.named_parameters())
    heads = {m.heads for m in model.module.transformer.modules() if hasattr(m, "to_q")}
    return {
        "shapes": {name.replace(".inner", ""): list(p.shape) for name, p in named.items()},
        "dtypes": sorted({str(p.dtype) for n, p in named.items() if "transformer_blocks" in n}),
        "heads": sorted(heads),
    }


def test_a_rank_holds_slices_in_the_storage_dtype(tmp_path):
    path = write_tiny_flux(tmp_path / "x.safetensors", dtype=torch.bfloat16, **SIZES)
    dims = inspect_flux(path).dims
    for index, rank in enumerate(run_ranks(parameters_of, 2, str(path))):
        assert rank["shapes"] == {name: list(shape) for name, shape in sliced_shapes(dims, 2, index).items()}
        assert rank["dtypes"] == ["torch.bfloat16", "torch.float8_e4m3fn"]
        assert rank["heads"] == [1]


def test_slices_are_views_of_the_mapped_file_wherever_they_lie_in_one_place(tmp_path):
    path = write_tiny_flux(tmp_path / "x.safetensors", **SIZES)
    slices = Slices(2, 1, lambda partial: partial, lambda columns: columns)
    model = load(ModelSpec(str(path)), torch.device("cpu"), ModelPart(slices=slices))
    copies = {
        name
        for name, parameter in model.module.transformer.named_parameters()
        if ".norm_" not in name and not is_mapped(path, parameter)
    }
    assert copies == {f"single_transformer_blocks.{i}.proj_out.weight" for i in range(SINGLE)}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return str(write_tiny_flux(tmp_path_factory.mktemp("tensor") / "tiny.safetensors", **SIZES))


def test_a_rank_that_does_not_add_up_is_seen_and_xfuser_leaves_slices_to_native_by_name(path):
    ((expected, _),) = run_ranks(answer, 1, path, ParallelStrategy())
    for found, (note,) in run_ranks(answer, 2, path, TENSOR_2, "auto", "xfuser"):
        assert relative_difference(found, expected) <= TOLERANCE
        assert note.startswith(
            "engine xfuser fell back to native: its tensor parallelism splits the feed-forward"
        )
    apart, _ = run_ranks(answer, 2, path, TENSOR_2, "auto", "native", False)[0]
    assert relative_difference(apart, expected) > 1000 * TOLERANCE


def refused(world, path):
    try:
        load_under(ModelSpec(path), Layouts(world), TENSOR_2)
    except StrategyError as error:
        return str(error)


def test_heads_that_do_not_divide_are_refused_on_every_rank(tmp_path):
    path = str(write_tiny_flux(tmp_path / "tiny.safetensors", **SIZES | {"heads": 3}))
    for message in run_ranks(refused, 2, path):
        assert "does not divide the 3 attention heads of tiny.safetensors" in message
        assert "nearest valid setting is tensor_degree 1" in message


def test_operators_find_their_meeting_by_its_name_as_long_as_its_owner_keeps_it():
    before = set(tensor_parallel._by_name)
    meeting = tensor_parallel.SliceMeeting(Axis((7, 9), 0, None), torch.device("cpu"))
    assert set(tensor_parallel._by_name) - before == {"processes (7, 9)"}
    del meeting
    gc.collect()
    assert set(tensor_parallel._by_name) == before


def test_a_compiled_sum_is_that_of_the_meeting(monkeypatch):
    monkeypatch.setattr(tensor_parallel, "all_reduce", lambda partial, axis: partial.mul_(3))
    monkeypatch.setattr(tensor_parallel, "all_gather", lambda mine, *_: torch.cat([mine, mine], 1))
    meeting = tensor_parallel.SliceMeeting(Axis((7, 9), 0, None), torch.device("cpu"))
    compiled = torch.compile(lambda x: meeting.join(meeting.add_up(x + 1)), backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(2, 3)), torch.full((2, 6), 6.0))
