"""Samplers that a node adds while the prompt runs, as loop packs do, give the stock latent and report on that node."""

from __future__ import annotations

import pytest
import torch

from differences import relative_difference
from graphs import STOCK, Graph

EXACT = 1e-4  # relative to the largest value


def _sampled(comfy, sampler: str, *, stock: bool) -> tuple[torch.Tensor, str]:
    """Returns (the latent, the id of the node that adds the samplers)."""
    graph = Graph()
    model = graph.model(STOCK, comfy.write_flux("tiny_dev.safetensors"))
    if not stock:
        ours = graph.add("ParallelModel", model=model, strategy=graph.strategy("cpu:2", ulysses=2))
        model = [ours, int(sampler == "ParallelSampler")]
    node = graph.add(
        "TestTwice", sampler=sampler, model=model, prompt=graph.text(1), latent=graph.latent(draw=3)
    )
    return comfy.sample(graph.prompt, [node, 0]), node


@pytest.mark.parametrize("sampler", ["KSampler", "ParallelSampler"])
def test_they_give_the_stock_latent_and_are_shown_on_the_node_that_stands_for_them(comfy, sampler):
    expected, _ = _sampled(comfy, "KSampler", stock=True)
    with comfy.client.listen() as events:
        found, node = _sampled(comfy, sampler, stock=False)
    assert relative_difference(found, expected) < EXACT
    kinds = {"parallel_sampling.progress", *({"parallel_sampling.run"} if sampler == "KSampler" else ())}
    told = {(one["type"], one["data"]["node"]) for one in events.messages if one["type"] in kinds}
    assert told == {(kind, node) for kind in kinds}
