"""Calls of ComfyUI's own modules through a sidecar: the answer of one process, under each way to share a call out."""

from __future__ import annotations

import pytest
import torch

from comfy_weight_files import CPU, inputs, spec, write
from parallel_backend.errors import RequestError
from parallel_backend.models.comfyui.load import load
from parallel_backend.options import ComputeOptions
from parallel_backend.requests import BLOCK, ROWS, STAY, ModuleCall, Placement, Reuse
from parallel_backend.strategy import ParallelStrategy

TOLERANCE = 1e-5


@pytest.fixture
def model(tmp_path):
    return spec(write(tmp_path / "model.safetensors", "bf16"))


def test_every_way_to_share_out_a_call_gives_the_answer_of_one_process(two_real_ranks, model):
    args, kwargs = inputs()
    with torch.inference_mode():
        wanted = load(model, CPU).module(*args, **kwargs)
    sent = {}
    for strategy in (
        ParallelStrategy(ulysses_degree=2),
        ParallelStrategy(ring_degree=2),
        ParallelStrategy(cfg_degree=2),
    ):
        for tokens in (STAY, BLOCK, ROWS):
            call = ModuleCall(args, kwargs, 2, tokens)
            answer, info = two_real_ranks.call(model, call, Placement(strategy))
            assert (answer - wanted).abs().max() <= TOLERANCE * wanted.abs().max()
            assert (info.engine, info.exact, info.notes) == ("native", True, ())
            sent[strategy, tokens] = max(info.bytes_sent)
    ulysses = ParallelStrategy(ulysses_degree=2)
    assert 0 < sent[ulysses, ROWS] < sent[ulysses, STAY] < sent[ulysses, BLOCK]


def test_a_wish_for_another_kernel_is_answered_in_words(two_real_ranks, model):
    args, kwargs = inputs()
    placement = Placement(
        ParallelStrategy(ulysses_degree=2), compute_options=ComputeOptions(attention="flash")
    )
    _, info = two_real_ranks.call(model, ModuleCall(args, kwargs, 2), placement)
    assert info.notes == (
        "attention flash fell back to torch: modules of ComfyUI's own attend as its command line has it",
    )


def test_a_refused_call_leaves_the_ranks_usable(two_real_ranks, model):
    placement = Placement(ParallelStrategy(ulysses_degree=2))
    args, kwargs = inputs()
    for call in (ModuleCall((), {}, 1, method="cpu"), ModuleCall(args, kwargs, 0)):
        with pytest.raises(RequestError):
            two_real_ranks.call(model, call, placement)
    answer, _ = two_real_ranks.call(model, ModuleCall(args, kwargs, 2), placement)
    assert answer.shape == args[0].shape


@pytest.mark.parametrize("choice", [{"ulysses_degree": 2}, {"ring_degree": 2}, {"cfg_degree": 2}])
def test_what_the_module_itself_refuses_alike_on_every_rank_leaves_them_warm(two_real_ranks, model, choice):
    placement = Placement(ParallelStrategy(**choice))
    args, kwargs = inputs()
    answer, _ = two_real_ranks.call(model, ModuleCall(args, kwargs, 2, STAY), placement)
    pids = two_real_ranks.pids
    wrong = kwargs | {"context": kwargs["context"][..., :-8]}
    with pytest.raises(RequestError, match=r"Flux cannot compute with what it was given.*mat1"):
        two_real_ranks.call(model, ModuleCall(args, wrong, 2, STAY), placement)
    again, info = two_real_ranks.call(model, ModuleCall(args, kwargs, 2, STAY), placement)
    assert torch.equal(again, answer)
    assert two_real_ranks.pids == pids and info.load.cached


def test_calls_of_one_run_go_by_a_step_cache_and_others_are_whole_to_the_bit(two_real_ranks, model):
    (x, times), kwargs = inputs()
    placement = Placement(ParallelStrategy(ulysses_degree=2))

    def call(far, reuse=None):
        moved = ModuleCall((x + far * x.flip(-1), times), kwargs, 2, STAY, reuse=reuse)
        answer, info = two_real_ranks.call(model, moved, placement)
        return answer, (info.model_calls, info.reused_calls, info.exact)

    steps = (0.0, 0.01, 1.0, 1.01)
    plain = [call(far) for far in steps]
    assert {counts for _, counts in plain} == {(0, 0, True)}
    cached = [call(far, Reuse(5, 1, 0.05)) for far in steps]
    assert [counts for _, counts in cached] == [(1, 0, True), (1, 1, False)] * 2
    for number, ((whole, _), (answer, _)) in enumerate(zip(plain, cached, strict=True)):
        assert torch.equal(answer, whole) == (number % 2 == 0)
    for reuse in (None, Reuse(5), Reuse(6, 1, 0.05)):  # without, of no kind, of another run
        assert torch.equal(call(steps[3], reuse)[0], plain[3][0])
