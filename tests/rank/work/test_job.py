"""Jobs over models that a rank holds: nothing of a model stays once it is dropped."""

import gc
import weakref

import pytest
import torch

from loop_jobs import loop_job, tiny_model
from loop_ranks import LoopRanks
from parallel_backend.strategy import ParallelStrategy
from ranks import run_ranks


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


@pytest.mark.parametrize("axis", ["ulysses_degree", "tensor_degree"])
def test_a_dropped_model_is_freed_by_one_collection(tmp_path, axis):
    """What is left is exempted from later collections when the next model is loaded (held_models.import_for)."""
    assert run_ranks(is_freed, 2, tiny_model(tmp_path), ParallelStrategy(**{axis: 2})) == [True, True]
