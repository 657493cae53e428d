"""Calls of a ComfyUI module through a sidecar with real ranks, whose module is a script."""

import math
import os
import signal

import pytest
import torch

from parallel_backend.errors import RankFailed, RequestError
from parallel_backend.requests import BLOCK, ROWS, ModelSpec, ModuleCall
from parallel_backend.sidecar.group.exchange import Exchange
from tests.support.scripted import CRASH, RAISE_ALL, scripted_sidecar, scripted_weights, two_ranks


@pytest.fixture
def sidecar():
    sidecar = scripted_sidecar()
    yield sidecar
    sidecar.stop()


@pytest.fixture
def spec(tmp_path) -> ModelSpec:
    return scripted_weights(tmp_path / "module.safetensors", "loads 2.0")


def call(x, tokens=BLOCK, method="forward", **kwargs) -> ModuleCall:
    return ModuleCall((x,), kwargs, rows=len(x), tokens=tokens, method=method)


def test_a_call_of_any_shape_comes_back_with_what_it_ran_on(sidecar, spec):
    video = torch.randn(2, 4, 3, 6, 5)
    (answer, told), info = sidecar.call(
        spec, call(video, ROWS, "preprocess", names=("a", math.inf)), two_ranks()
    )
    assert torch.equal(answer, video * 2.0)
    assert told == ("preprocess", ROWS, 2, ("a", math.inf))
    assert info.load is not None and not info.load.cached
    assert sidecar.call(spec, call(video), two_ranks())[1].load.cached


def test_what_cannot_be_sent_is_refused_before_ranks_start(sidecar, spec):
    with pytest.raises(RequestError, match=r"patch.*cannot be sent"):
        sidecar.call(spec, call(torch.ones(1), patch=object()), two_ranks())
    assert sidecar.pids == ()


def test_an_error_of_the_module_is_told_and_the_next_call_works(sidecar, spec):
    with pytest.raises(RequestError, match="every rank refuses"):
        sidecar.call(spec, call(torch.ones(1), behaviour=RAISE_ALL), two_ranks())
    assert sidecar.call(spec, call(torch.ones(1)), two_ranks())[0][0] == 2.0


def test_a_rank_that_crashes_in_a_call_ends_it_by_name_and_the_next_call_works(sidecar, spec):
    with pytest.raises(RankFailed, match="rank 1"):
        sidecar.call(spec, call(torch.ones(1), behaviour=CRASH), two_ranks())
    assert sidecar.call(spec, call(torch.ones(1)), two_ranks())[0][0] == 2.0


def test_a_prompt_travels_once_and_each_call_sees_it_as_it_was(sidecar, spec, monkeypatch):
    sent = []
    send = Exchange.send_call
    monkeypatch.setattr(
        Exchange,
        "send_call",
        lambda self, message, tensors: (
            sent.append(sum(t.nbytes for t in tensors.values())),
            send(self, message, tensors),
        )[1],
    )
    x, long, other = torch.ones(1), torch.full((1, 512, 64), 1.5), torch.full((1, 512, 64), 3.0)
    answers = [
        sidecar.call(spec, call(x, context=context), two_ranks())[0][0].item()
        for context in (long, long.clone(), other, long)
    ]
    assert answers == [6.0, 6.0, 12.0, 6.0]
    calls = sent[-4:]
    assert [size > long.nbytes for size in calls] == [True, False, True, False]
    sidecar.sleep(1)
    assert sidecar.call(spec, call(x, context=long), two_ranks())[0][0] == 6.0


def test_after_a_crash_the_prompt_is_sent_again(spec):
    sidecar, long = scripted_sidecar(resumes=True), torch.full((1, 512, 64), 1.5)
    try:
        assert sidecar.call(spec, call(torch.ones(1), context=long), two_ranks())[0][0] == 6.0
        os.kill(sidecar.pids[1], signal.SIGKILL)
        assert sidecar.call(spec, call(torch.ones(1), context=long), two_ranks())[0][0] == 6.0
    finally:
        sidecar.stop()
