"""A rank's handshake, hostile frames and payloads, late cancels, and jobs with a real model."""

import os

import pytest
import torch

from flux_requests import flux_request
from parallel_backend.errors import RankFailed, TransportError
from parallel_backend.requests import ModelSpec, Placement
from parallel_backend.sidecar.group import exchange as client
from parallel_backend.sidecar.sidecar import Sidecar, State
from parallel_backend.strategy import ParallelStrategy
from parallel_backend.wire.protocol import VERSION, Cancel, Envelope, encode
from parallel_backend.wire.transport import pack_tensors
from scripted import is_running, scripted_request, two_ranks
from tiny_flux import write_tiny_flux
from waiting import PATIENCE, wait_until


@pytest.mark.real_start
def test_a_rank_of_another_version_is_refused(no_leaks):
    sidecar = Sidecar(("cpu:0",), rank_module="tests.support.rank_programs.old_rank")
    with pytest.raises(
        RankFailed, match=rf"version {VERSION + 1}, .* has {VERSION}; restart ComfyUI"
    ) as caught:
        sidecar.start()
    assert caught.value.reason == "version"
    sidecar.stop()


@pytest.mark.real_start
def test_a_rank_that_sends_garbage_is_ended(no_leaks):
    sidecar = Sidecar(("cpu:0",), rank_module="tests.support.rank_programs.garbage_rank")
    with pytest.raises(TransportError, match="process 0 sent what the protocol does not allow"):
        sidecar.start()
    assert sidecar.pids == ()


def unsealed(tensors):
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    sealed = pack_tensors(tensors)
    os.sendfile(descriptor, sealed, 0, os.fstat(sealed).st_size)
    os.close(sealed)
    return descriptor


def without_noise(tensors):
    return pack_tensors({name: tensor for name, tensor in tensors.items() if name != "noise"})


def with_more(tensors):
    return pack_tensors({**tensors, "more": torch.zeros(1)})


@pytest.mark.parametrize(
    ("pack", "reason"),
    [
        (unsealed, "not sealed"),
        (without_noise, "lacks the tensor 'noise'"),
        (with_more, "unknown tensors: more"),
    ],
)
def test_a_hostile_payload_is_refused_and_the_group_lives_on(sidecar, weights, monkeypatch, pack, reason):
    sidecar.load(weights)
    pids = sidecar.pids
    with monkeypatch.context() as patched, pytest.raises(TransportError, match=reason):
        patched.setattr(client, "pack_tensors", pack)
        sidecar.sample(weights, scripted_request(), two_ranks())
    sidecar.sample(weights, scripted_request(), two_ranks())
    assert sidecar.pids == pids


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (lambda epoch: encode(Envelope(epoch - 1, 1, Cancel())), "came in epoch"),
        (lambda epoch: encode(Envelope(epoch, 1, Cancel())).replace(b"Cancel", b"Reboot"), "unknown message"),
        (lambda epoch: b"{", "not valid JSON"),
    ],
    ids=["stale epoch", "unknown op", "not JSON"],
)
def test_a_frame_that_cannot_be_answered_ends_the_rank_with_the_reason(sidecar, weights, frame, reason):
    sidecar.load(weights)
    group = sidecar._ranks.group
    group.links[1]._socket.send(frame(group.epoch))
    assert group.gone.wait(PATIENCE)
    assert group.death.rank == 1
    assert reason in group.death.exit_status.words
    assert sidecar.state is State.FAILED
    sidecar.sample(weights, scripted_request(), two_ranks())


def test_a_cancel_that_comes_too_late_does_not_hit_the_next_request(sidecar, weights):
    sidecar.sample(weights, scripted_request(), two_ranks())
    group = sidecar._ranks.group
    group.links[0].send(Envelope(group.epoch, 2, Cancel()))
    result = sidecar.sample(weights, scripted_request(steps=3), two_ranks())
    assert len(result.info.step_seconds) == 3


def test_a_rank_ends_when_its_link_does(sidecar):
    sidecar.start()
    group = sidecar._ranks.group
    pids = group.pids
    group.links[0].shut_down()
    wait_until(lambda: not any(map(is_running, pids)))


# The real rank program, on a tiny Flux.


@pytest.fixture
def flux(tmp_path):
    return ModelSpec(path=str(write_tiny_flux(tmp_path / "tiny flux.safetensors")))


@pytest.mark.parametrize(("warmup_steps", "is_exact"), [(4, True), (1, False)])
def test_pipefusion_has_progress_previews_and_a_word_on_exactness(
    two_real_ranks, flux, warmup_steps, is_exact
):
    strategy, steps = ParallelStrategy(pipefusion_degree=2, warmup_steps=warmup_steps), []
    result = two_real_ranks.sample(
        flux, flux_request(), Placement(strategy), on_step=lambda *step: steps.append(step)
    )
    assert [(step, of) for step, of, _ in steps] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert torch.allclose(steps[-1][2], result.latent, atol=1e-6)
    assert len(result.info.step_seconds) == 4 and result.info.exact == is_exact
