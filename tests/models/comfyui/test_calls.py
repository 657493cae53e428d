"""Arguments that ComfyUI passes unchanged for any number of rows, and when they may describe several rows."""

from __future__ import annotations

import pytest
import torch

from comfy_modules import import_comfyui_here
from loop_jobs import loop_job, tiny_model
from loop_ranks import LoopRanks
from parallel_backend.engine.module_forward import ModuleForward
from parallel_backend.models.comfyui.calls import find_constants, has_joint_rows
from parallel_backend.strategy import ParallelStrategy
from ranks import run_ranks


def test_constants_are_what_comfyui_calls_so_in_any_prompt():
    import_comfyui_here()
    from comfy.conds import CONDConstant, CONDRegular

    rows, points = CONDRegular(torch.ones(2, 3)), CONDConstant(torch.ones(7, 4))
    conds = {
        "positive": [{"model_conds": {"y": rows}}, {"model_conds": {"points": points}}],
        "negative": [{"model_conds": {"y": rows, "rate": CONDConstant(24.0)}}],
        "middle": [{}],
        "none": None,
    }
    assert find_constants(conds) == {"points", "rate"}
    for other in ({}, None, [rows], {"positive": [[torch.ones(1), {}]]}):
        assert find_constants(other) == set()


@pytest.mark.parametrize(
    ("value", "described", "undescribed"),
    [
        (24.0, False, False),
        ("a word", False, False),
        (None, False, False),
        (torch.tensor(2.0), False, True),
        (torch.ones(3, 4), False, True),
        (torch.ones(2, 4), True, True),
        ({"tokens": [torch.ones(7), torch.ones(2)]}, True, True),
    ],
)
def test_a_tensor_with_as_many_lines_as_rows_or_of_an_unknown_class_keeps_rows_together(
    value, described, undescribed
):
    assert has_joint_rows([value], 2, is_described=True) == described
    assert has_joint_rows([value], 2, is_described=False) == undescribed


def recorded(world, spec, jobs):
    """Returns the set of `joint_rows` of each job's calls: True if a call kept its rows together."""
    found, compute = [], ModuleForward.__call__

    def record(self, call, cache=None):
        found[-1].add(call.joint_rows)
        return compute(self, call, cache)

    ModuleForward.__call__ = record
    ranks = LoopRanks(world, spec)
    for job in jobs:
        found.append(set())
        ranks.run(ParallelStrategy(cfg_degree=2), job)
    return found


def test_a_jobs_calls_keep_rows_together_for_such_a_constant_alone(tmp_path):
    def with_constant(value):
        job = loop_job(steps=2)
        for (prompt,) in job.conds.values():
            prompt["model_conds"]["lengths"] = ("CONDConstant", value)
        return job

    jobs = [loop_job(steps=2), with_constant(torch.tensor([3, 4])), with_constant(torch.tensor([3, 4, 5]))]
    assert run_ranks(recorded, 2, tiny_model(tmp_path), jobs) == 2 * [[{False}, {True}, {False}]]
