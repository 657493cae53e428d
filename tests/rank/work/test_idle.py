"""A rank frees the device memory that torch keeps, after every request and before ComfyUI hears of its end."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from parallel_backend.rank import __main__ as rank_main
from parallel_backend.rank.work import held_models
from parallel_backend.wire.protocol import Done, Envelope, KeepModels, RankModels
from parallel_backend.wire.transport import LinkClosed, link_pair

DONE = Done(models=RankModels((1,)))


def test_memory_is_given_back_before_comfyui_hears_of_the_end(monkeypatch, no_leaks):
    """All requests are answered in one place, so one that drops models stands for jobs too."""
    seen = []
    world = SimpleNamespace(rank=0, device=torch.device("cpu"), control=None)
    worker = SimpleNamespace(world=world, answer=lambda *request: (DONE, None))
    monkeypatch.setattr(held_models, "release_cache", lambda device: seen.append("released"))
    ours, theirs = link_pair()
    monkeypatch.setattr(theirs, "send", lambda envelope, *rest: seen.append(envelope.message))
    ours.send(Envelope(1, 1, KeepModels((1,))))
    ours.close()
    with pytest.raises(LinkClosed):
        rank_main.serve(theirs, 1, worker)
    theirs.close()
    assert seen == ["released", DONE]
