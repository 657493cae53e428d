"""Jobs over models that a rank holds: a job that fails leaves ComfyUI's list of loaded models in order, and nothing of
a model stays once it is dropped."""

import gc
import weakref

import pytest
import torch

from loop_jobs import loop_job, tiny_model
from loop_ranks import LoopRanks
from parallel_backend.errors import RequestError
from parallel_backend.rank.jobs import set_up
from parallel_backend.strategy import ParallelStrategy
from ranks import run_ranks

ULYSSES = ParallelStrategy(ulysses_degree=2)


@torch.inference_mode()
def is_freed(world, spec, strategy):
    """Returns True if one garbage collection frees a model that has run a job, after the rank has dropped it."""
    ranks = LoopRanks(world, spec)
    ranks.run(strategy, loop_job())
    (held,) = ranks.models.values()
    base = weakref.ref(held.model.patcher.model)
    assert held.of_jobs.base is base()
    del held
    ranks.models.clear()
    ranks._forwards.clear()
    gc.collect()
    return base() is None


@pytest.mark.parametrize("strategy", [ULYSSES, ParallelStrategy(tensor_degree=2)], ids=["Ulysses", "tensor"])
def test_a_dropped_model_is_freed_by_one_collection(tmp_path, strategy):
    """Loading the next model exempts all remaining objects from later collections (held_models.import_for)."""
    assert run_ranks(is_freed, 2, tiny_model(tmp_path), strategy) == [True, True]


@torch.inference_mode()
def has_dead_model(world, spec):
    """Returns True if ComfyUI lists a model that has lost its patcher, after a job failed before it loaded its own."""
    from comfy import model_management

    def fail(*args):
        raise RequestError("this job fails early")

    ranks = LoopRanks(world, spec)
    ranks.run(ULYSSES, loop_job())
    (held,) = ranks.models.values()
    held.of_jobs.base.current_patcher = None  # as ComfyUI's own guider ends
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(set_up, "set_generators", fail)
        with pytest.raises(RequestError, match="this job fails early"):
            ranks.run(ULYSSES, loop_job())
    gc.collect()
    return any(loaded.is_dead() for loaded in model_management.current_loaded_models)


def test_a_job_that_fails_early_leaves_no_model_without_its_patcher(tmp_path):
    """ComfyUI would report a leak and collect all garbage before each later load."""
    assert run_ranks(has_dead_model, 2, tiny_model(tmp_path)) == [False, False]
