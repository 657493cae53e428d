"""The model that a loader of a prompt names, and the strategy that its sampler would use."""

import pytest

from pack_nodes import module_fixture

module = module_fixture("nodes.preload.named_model")

LOADER = {"class_type": "ParallelModelLoader", "inputs": {"unet_name": "model.safetensors"}}


def _node(kind: str, **inputs: object) -> dict[str, object]:
    return {"class_type": kind, "inputs": inputs}


@pytest.mark.parametrize(
    ("between", "link"),
    [({}, "1"), ({"2": _node("ParallelLoraLoader", parallel_model=["1", 1], strength=1.0)}, "2")],
    ids=["at once", "behind a LoRA"],
)
def test_a_samplers_own_strategy_counts(module, between, link):
    """A sampler without one comes first in the prompt."""
    prompt = {
        "5": _node("ParallelSampler", parallel_model=[link, 1], seed=1),
        "1": LOADER,
        **between,
        "6": _node("ParallelSampler", parallel_model=[link, 1], strategy=["7", 0]),
        "7": _node("StrategySelector", mode="manual", devices="cpu:2"),
    }
    assert module._samplers(prompt, "1") == ["7", 0]
    del prompt["6"]
    assert module._samplers(prompt, "1") is None


def test_nodes_in_a_circle_are_looked_at_once(module):
    prompt = {
        "1": LOADER,
        "2": _node("ParallelLoraLoader", parallel_model=["3", 0], also=["1", 1]),
        "3": _node("ParallelLoraLoader", parallel_model=["2", 0]),
        "4": _node("ParallelLoraLoader", parallel_model=["1", 1]),
    }
    assert module._samplers(prompt, "1") is None and module._samplers(prompt, "2") is None
