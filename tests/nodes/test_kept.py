"""Latents that wait for their prompts: given for the very job that they were computed for, gone with their prompts."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass

import pytest
import torch

from pack_nodes import import_node_module
from waiting import wait_until

kept_module = import_node_module("nodes.together.kept")


class _Model:
    """A weak reference to it can be had."""


@dataclass(frozen=True)
class _Job:
    parallel_model: _Model
    positive: list
    seed: int
    steps: int = 3
    strategy: object = None


def _job(seed: int = 1) -> _Job:
    return _Job(_Model(), [[torch.zeros(1, 2), {}]], seed)


@pytest.fixture
def queued() -> set[str]:
    return {"a", "b"}


@pytest.fixture
def kept(queued, monkeypatch):
    monkeypatch.setattr(kept_module, "_LOOK_AGAIN", 0.01)
    found = kept_module.KeptLatents(lambda: queued)
    yield found
    queued.clear()
    wait_until(lambda: found._watcher is None)


def _keep(kept, job: _Job, seed: int, prompt: str = "a", node: str = "7") -> torch.Tensor:
    samples = torch.full((1, 4), float(seed))
    kept.keep((prompt, node), kept_module.Ahead(job, seed, samples, None))
    return samples


def _with(job: _Job, **changes) -> _Job:
    return _Job(**{**vars(job), **changes})


def test_it_is_given_once_for_the_same_objects_numbers_and_seed(kept):
    job = _job()
    samples = _keep(kept, job, 5)
    assert kept.bytes == 16 and kept.passed("7", job) == {"a"} and kept.passed("8", job) == set()
    assert kept.take(("a", "8"), job) is None and kept.take(("b", "7"), _with(job, seed=5)) is None
    assert kept.take(("a", "7"), _with(job, seed=5)).samples is samples
    assert kept.take(("a", "7"), _with(job, seed=5)) is None
    assert kept.bytes == 0 and kept.passed("7", job) == set()


@pytest.mark.parametrize(
    "change",
    [{"seed": 6}, {"steps": 4}, {"positive": [[torch.zeros(1, 2), {}]]}, {"parallel_model": _Model()}],
)
def test_for_any_other_job_it_is_dropped_and_its_prompt_computed_alone(kept, change):
    job = _job()
    _keep(kept, job, 5)
    assert kept.take(("a", "7"), _with(job, **{"seed": 5, **change})) is None
    assert kept.bytes == 0 and kept.passed("7", job) == {"a"}
    assert kept.has_missed("7") and not kept.has_missed("8")


def test_lists_of_jobs_of_one_prompt_find_their_own(kept):
    job, other = _job(), _job()
    first = _keep(kept, job, 5)
    assert kept.passed("7", job) == {"a"} and kept.passed("7", other) == set()  # which is to be computed too
    second = _keep(kept, other, 5)
    assert kept.take(("a", "7"), _with(other, seed=5)).samples is second
    assert kept.take(("a", "7"), _with(job, seed=5)).samples is first


def test_what_prompts_leave_behind_that_are_gone_is_dropped(kept, queued):
    job = _job()
    _keep(kept, job, 5)
    _keep(kept, job, 6, prompt="b")
    kept.leave_alone(["b"])
    queued.discard("a")
    wait_until(lambda: kept.passed("7", job) == {"b"})
    assert kept.bytes == 16
    queued.discard("b")
    wait_until(lambda: kept.bytes == 0 and not kept.passed("7", job))


def test_where_it_did_not_hold_is_known_until_the_queue_is_empty(kept, queued):
    job = _job()
    _keep(kept, job, 5)
    kept.take(("a", "7"), _job(5))
    queued.discard("a")
    wait_until(lambda: not kept.passed("7", job))
    assert kept.has_missed("7")
    queued.discard("b")
    wait_until(lambda: not kept.has_missed("7"))


def test_it_does_not_keep_the_model_that_it_was_computed_with(kept):
    job = _job()
    model = weakref.ref(job.parallel_model)
    _keep(kept, job, 5)
    del job
    gc.collect()
    assert model() is None
