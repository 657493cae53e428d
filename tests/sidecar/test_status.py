"""The status of a group: progress, phases and memory, which can be read while its ranks are busy."""

import pytest

from flux_requests import request
from parallel_backend.requests import ModelSpec, Placement
from parallel_backend.sidecar.group.lease import Phase, PhaseKind
from parallel_backend.sidecar.sidecar import Sidecar
from parallel_backend.sidecar.status import read_ranks
from parallel_backend.strategy import ParallelStrategy
from tiny_flux import write_tiny_flux


def test_ranks_tell_their_steps_memory_and_bytes_while_they_work(two_real_ranks, tmp_path):
    spec = ModelSpec(str(write_tiny_flux(tmp_path / "tiny.safetensors")))
    never_started, sidecar = Sidecar(("cpu:0",)).status(), two_real_ranks
    assert (never_started.state, never_started.ranks) == ("down", ())
    sidecar.sleep()  # drops the models of other tests
    seen = []
    sidecar.sample(
        spec,
        request((8, 8), 1.0, 1, steps=3),
        Placement(ParallelStrategy(ulysses_degree=2)),
        on_step=lambda *_: seen.append(sidecar.status()),
    )
    after = sidecar.status()
    sidecar.sleep()
    asleep = sidecar.status()
    assert [(one.state, one.phase, one.step, one.steps) for one in seen] == [
        ("running", Phase(PhaseKind.SAMPLING), step, 3) for step in (1, 2, 3)
    ]
    assert [len(one.step_seconds) for one in seen] == [1, 2, 3]
    assert [one.models for one in seen] == [("tiny.safetensors",)] * 3
    ranks = after.ranks
    assert [(rank.rank, rank.device) for rank in ranks] == [(0, "cpu:0"), (1, "cpu:1")]
    assert all((rank.step, rank.loaded) == (3, 1.0) and rank.pid for rank in ranks)
    held = (tmp_path / "tiny.safetensors").stat().st_size
    assert all(rank.weight_bytes == pytest.approx(held, rel=0.1) for rank in ranks)
    assert all(rank.working_bytes > 0 and rank.sent_bytes > 0 for rank in ranks)
    assert (after.step, after.steps, after.phase) == (0, 0, None)
    assert (asleep.state, asleep.models) == ("asleep", ())
    assert [rank.weight_bytes for rank in asleep.ranks] == [0, 0]
    assert read_ranks(None) == ()
