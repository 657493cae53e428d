"""A job for ComfyUI's own loop over the link: the same on the other side, or refused."""

from __future__ import annotations

import os
from dataclasses import fields

import pytest
import torch

from loop_jobs import loop_job
from parallel_backend.errors import RequestError, TransportError
from parallel_backend.requests import LoopRequest
from parallel_backend.wire.arguments import pack_arguments
from parallel_backend.wire.loop import loop_request, loop_tensors
from parallel_backend.wire.transport import pack_tensors, unpack_tensors


def over_the_link(job):
    descriptor = pack_tensors(loop_tensors(job))
    try:
        return loop_request(unpack_tensors(descriptor))
    finally:
        os.close(descriptor)


def assert_equal(found, wanted):
    assert type(found) is type(wanted)
    if isinstance(wanted, torch.Tensor):
        assert torch.equal(found, wanted)
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted)
        for key in wanted:
            assert_equal(found[key], wanted[key])
    elif isinstance(wanted, (list, tuple)):
        for mine, theirs in zip(found, wanted, strict=True):
            assert_equal(mine, theirs)
    else:
        assert found == wanted


def test_a_job_arrives_as_it_was():
    area = {"area": (4, 3, 0, 2), "strength": 0.5, "mask": torch.ones(1, 9, 6), "timestep_start": 0.75}
    job = loop_job("dpmpp_sde", mask=True, batch=2, seed=2**64 - 1)
    job.conds["positive"][0].update(area)
    found = over_the_link(job)
    for field in fields(LoopRequest):
        assert_equal(getattr(found, field.name), getattr(job, field.name))


@pytest.mark.parametrize(
    "tree",
    [
        [1, 2],
        {"noise": torch.ones(1, 4, 2, 2)},
        vars(loop_job()) | {"conds": {"positive": [{}]}},
        vars(loop_job()) | {"conds": {"positive": [{"model_conds": {"y": 3}}]}},
        vars(loop_job()) | {"conds": 7},
        vars(loop_job()) | {"cfg": "much"},
    ],
    ids=["a list", "a part", "no model_conds", "no pair", "no prompts", "a word"],
)
def test_another_payload_is_refused(tree):
    with pytest.raises((TransportError, RequestError)):
        loop_request(pack_arguments(tree))
