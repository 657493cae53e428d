"""Calls of ComfyUI's own modules through a sidecar give the answer of one process, however ranks split them."""

from __future__ import annotations

import pytest
import torch

from comfy_weight_files import inputs, spec, write
from parallel_backend.errors import RequestError
from parallel_backend.options import ComputeOptions
from parallel_backend.requests import STAY, Placement
from parallel_backend.strategy import ParallelStrategy
from shipped_jobs import ship_call

TOLERANCE = 1e-5


def call(ranks, model, placement, args, kwargs, mode=STAY):
    """Calls the network once; returns its answer and the RunInfo."""
    result = ranks.sample(model, ship_call(model, args, kwargs, mode), placement)
    return result.parts[0], result.info


@pytest.fixture
def model(tmp_path):
    return spec(write(tmp_path / "model.safetensors", "bf16"))


def test_a_chosen_kernel_is_used_or_refused_and_the_ranks_stay_usable(two_real_ranks, model):
    args, kwargs = inputs()
    for strategy in (ParallelStrategy(ulysses_degree=2), ParallelStrategy(ring_degree=2)):
        answers = []
        for attention in ("auto", "torch"):
            placement = Placement(strategy, compute_options=ComputeOptions(attention=attention))
            answer, info = call(two_real_ranks, model, placement, args, kwargs)
            answers.append(answer)
            assert (info.kernel, info.exact, info.notes) == ("torch", True, ())
        assert (answers[1] - answers[0]).abs().max() <= TOLERANCE * answers[0].abs().max()
        placement = Placement(strategy, compute_options=ComputeOptions(attention="flash"))
        with pytest.raises(RequestError, match="attention flash cannot run on cpu"):
            call(two_real_ranks, model, placement, args, kwargs)


@pytest.mark.parametrize("choice", [{"ulysses_degree": 2}, {"ring_degree": 2}, {"cfg_degree": 2}])
def test_what_the_module_itself_refuses_alike_on_every_rank_leaves_them_warm(two_real_ranks, model, choice):
    placement = Placement(ParallelStrategy(**choice))
    args, kwargs = inputs()
    answer, _ = call(two_real_ranks, model, placement, args, kwargs)
    pids = two_real_ranks.pids
    wrong = kwargs | {"context": kwargs["context"][..., :-8]}
    with pytest.raises(RequestError, match=r"Flux cannot compute with what it was given.*mat1"):
        call(two_real_ranks, model, placement, args, wrong)
    again, info = call(two_real_ranks, model, placement, args, kwargs)
    assert torch.equal(again, answer)
    assert two_real_ranks.pids == pids and info.load.cached
