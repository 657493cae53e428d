"""Module calls that a forward refuses, and those that it computes in another way and notes."""

import pytest
import torch
from torch import nn

from parallel_backend.engine.comm.groups import Layouts
from parallel_backend.engine.module_forward import make_module_forward
from parallel_backend.errors import RequestError
from parallel_backend.models.comfyui.tiny.cases import TinyModel
from parallel_backend.options import ComputeOptions
from parallel_backend.requests import ATTENTION, ROWS, ModuleCall, Placement
from parallel_backend.strategy import ParallelStrategy
from ranks import RankError, run_ranks

ULYSSES_2 = ParallelStrategy(ulysses_degree=2)


def test_a_model_that_is_in_no_table_says_so_before_anything_is_sent():
    model = TinyModel(nn.Linear(2, 2))

    def refused(world):
        forward = make_module_forward(model, Layouts(world), Placement(ULYSSES_2))
        with pytest.raises(RequestError, match="tokens of Linear cannot be shared out"):
            forward(ModuleCall((torch.ones(2, 2),), {}, 2))
        return forward.bytes_sent

    assert run_ranks(refused, 2) == [0, 0]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("pipefusion_degree", "pipefusion_degree 2: the blocks of Linear cannot be laid out over devices"),
        ("tensor_degree", "tensor_degree 2: the layers of Linear cannot be split"),
    ],
)
def test_degrees_that_no_module_can_be_split_by_are_refused(name, words):
    strategy = ParallelStrategy(**{name: 2})
    with pytest.raises(RequestError, match=words):
        make_module_forward(TinyModel(nn.Linear(2, 2)), None, Placement(strategy))


def test_wishes_that_change_nothing_are_noted():
    model = TinyModel(nn.Linear(2, 2))

    def notes(world):
        options = ComputeOptions(compile="blocks")
        placement = Placement(ParallelStrategy(shard_weights=True), "xfuser", options)
        return make_module_forward(model, Layouts(world), placement).notes

    (found,) = run_ranks(notes, 1)
    assert [
        words for note in found for words in ("shard_weights", "xfuser", "uncompiled") if words in note
    ] == ["shard_weights", "xfuser", "uncompiled"]


@pytest.mark.parametrize("strategy", [ParallelStrategy(cfg_degree=2), ULYSSES_2], ids=["cfg", "ulysses"])
def test_layers_that_scale_by_the_largest_value_are_not_exact_over_ranks(strategy):
    model = TinyModel(nn.Linear(2, 2))
    model.scales_by_largest = True

    def forward(world, strategy):
        made = make_module_forward(model, Layouts(world), Placement(strategy))
        return [made.exact, made.notes]

    for exact, (note,) in run_ranks(forward, 2, strategy):
        assert (exact, "not equal" in note) == (False, True)
    assert run_ranks(forward, 1, ParallelStrategy()) == [[True, []]]


def test_rows_that_belong_together_are_computed_by_the_first_rank_and_it_is_said():
    class Swapped(nn.Module):
        def forward(self, x, **kwargs):
            return x.flip(0)

    model = TinyModel(Swapped())
    model.inseparable_rows = True
    rows = torch.arange(6.0).view(3, 2)

    def answer(world):
        forward = make_module_forward(model, Layouts(world), Placement(ParallelStrategy(data_degree=2)))
        return [forward(ModuleCall((rows,), {}, 3, ROWS)), forward.notes]

    for found, notes in run_ranks(answer, 2):
        assert torch.equal(found, rows.flip(0))
        assert len(notes) == 1 and "by their place among all" in notes[0]


@pytest.mark.parametrize(
    "strategy", [ParallelStrategy(data_degree=2), ULYSSES_2, ParallelStrategy(cfg_degree=2)], ids=str
)
def test_rows_stay_together_where_an_argument_may_be_about_several(strategy):
    """Each row looks up its points in a list that all rows share, as in Trellis 2."""

    class Points(nn.Module):
        def forward(self, x, counts, points, **kwargs):
            first = torch.cumsum(counts, 0) - counts
            means = [points[a : a + n].mean(0) for a, n in zip(first, counts, strict=True)]
            return x + torch.stack(means[: len(x)])

    model, generator = TinyModel(Points()), torch.Generator().manual_seed(0)
    rows, points = torch.randn(2, 3, generator=generator), torch.randn(7, 3, generator=generator)
    arguments = {"counts": torch.tensor([3, 4]), "points": points}
    expected = model.module(rows, **arguments)

    def answer(world):
        forward = make_module_forward(model, Layouts(world), Placement(strategy))
        calls = [ModuleCall((rows,), arguments, 2, ATTENTION, joint_rows=joint) for joint in (True, False)]
        return [*map(forward, calls), forward.notes]

    for joint, apart, notes in run_ranks(answer, 2):
        assert torch.equal(joint, expected)
        assert sum("may be about several images" in note for note in notes) == (strategy.row_degree > 1)
        assert not torch.equal(apart, expected), "a row of its own took the first row's points"


def test_an_answer_that_has_no_rows_is_refused():
    class Summed(nn.Module):
        def forward(self, x, **kwargs):
            return x.sum()

    model = TinyModel(Summed())

    def refused(world):
        forward = make_module_forward(model, Layouts(world), Placement(ParallelStrategy(data_degree=2)))
        return forward(ModuleCall((torch.ones(2, 2),), {}, 2, ROWS))

    with pytest.raises(RankError, match="cannot be put together"):
        run_ranks(refused, 2)


@pytest.mark.parametrize(
    ("strategy", "attention", "said"),
    [
        (ParallelStrategy(ring_degree=2), "sage", True),
        (ParallelStrategy(ring_degree=2), "pytorch", False),
        (ULYSSES_2, "sage", False),
    ],
)
def test_a_ring_says_that_it_attends_by_another_kernel_than_comfyui_chose(strategy, attention, said):
    model = _Attending(nn.Linear(2, 2), attention)

    def notes(world):
        return make_module_forward(model, Layouts(world), Placement(strategy)).notes

    for found in run_ranks(notes, 2):
        assert [("attends by torch and not by sage" in note) for note in found] == [True] * said


class _Attending(TinyModel):
    attention = ""

    def __init__(self, module, attention):
        super().__init__(module)
        self.attention = attention
