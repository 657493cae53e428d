"""A rank frees the device memory that torch keeps after each request."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from parallel_backend.rank import __main__ as rank_main
from parallel_backend.rank.work import held_models
from parallel_backend.requests import Placement
from parallel_backend.strategy import ParallelStrategy
from parallel_backend.wire.protocol import (
    Done,
    Envelope,
    KeepModels,
    RankCall,
    RankModels,
    RankRun,
    RunJob,
)
from parallel_backend.wire.transport import LinkClosed, close_all, link_pair, pack_tensors

RUN = RankRun("native", ParallelStrategy(), 0.1, 0, ())
HELD = RankModels((1,))


def _run(message, tensors, on_step, on_compile):
    return {"tree": torch.ones(1)}, RankCall(0.1, 0) if message.placement is None else RUN


@pytest.fixture
def served(monkeypatch, no_leaks):
    """Yields serve(*requests), which returns the rank's answers, and "released" for each freed cache, in order."""
    seen = []
    monkeypatch.setattr(held_models, "release_cache", lambda device: seen.append("released"))
    worker = SimpleNamespace(
        world=SimpleNamespace(rank=0, device=torch.device("cpu"), control=None),
        meter=None,
        keep_models=lambda message: HELD,
        run_job=_run,
        run_plain_job=_run,
    )
    ours, theirs = link_pair()

    def serve(*requests):
        for request in requests:
            if isinstance(request, KeepModels):
                ours.send(Envelope(1, 1, request))
            else:
                descriptor = pack_tensors({"sigmas": torch.ones(2)})
                ours.send(Envelope(1, 1, request), (descriptor,))
                close_all((descriptor,))
        ours._socket.shutdown(1)  # end of file after these
        send = theirs.send
        monkeypatch.setattr(
            theirs,
            "send",
            lambda envelope, payload=(), timeout=0.0: (
                seen.append(envelope.message),
                send(envelope, payload, timeout),
            ),
        )
        with pytest.raises(LinkClosed):
            rank_main.serve(theirs, 1, worker)
        return seen

    yield serve
    while (received := _next(ours)) is not None:
        close_all(received[1])
    ours.close()
    theirs.close()


def _next(link):
    try:
        return link.receive(0.0)
    except LinkClosed:
        return None


@pytest.mark.parametrize(
    "job",
    [
        RunJob(Placement(), 1, cfg=1.0),
        RunJob(Placement(), 1, previews=False, model=1),
        RunJob(None, 0, model=1),
    ],
    ids=["a plain job", "a job", "a text"],
)
def test_after_a_job_memory_is_given_back_before_comfyui_hears_of_its_end(served, job):
    *given_back, done = served(job)
    assert given_back == ["released"] and isinstance(done, Done)


def test_after_models_were_dropped_it_is_given_back(served):
    assert served(KeepModels((1,))) == ["released", Done(models=HELD)]
