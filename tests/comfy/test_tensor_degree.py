"""tensor_degree on ComfyUI's own models gives the stock latent while each device computes slices of the layers.

tests/models/comfyui/formats/test_slices.py proves the slices of every class.
"""

from __future__ import annotations

import pytest

from any_runs import assert_same, both
from graphs import Graph

TENSOR = {"tensor": 2}


@pytest.mark.parametrize(
    ("kind", "choice"),
    [
        ("flux", TENSOR),
        ("wan_fp8", TENSOR),
        ("sd3", {"tensor": 3}),
        ("wan_t2v", TENSOR | {"shard_weights": True, "cfg": 2}),
        ("flux", TENSOR | {"ring": 2}),
    ],
)
def test_slices_give_the_stock_latent(comfy, kind, choice):
    found = both(comfy, kind, choice, with_sampler=True)
    assert_same(found)
    assert f"tensor {choice['tensor']}" in found["report"], found["report"]
    assert "alike" not in found["report"], found["report"]  # each device computes its part


def test_auto_does_not_slice_layers(comfy):
    graph = Graph()
    loader = graph.parallel_loader(comfy.write_flux("tiny_sliced.safetensors"), "cpu:2")
    sampled = graph.parallel_sampler(loader, graph.text(1), graph.text(2), graph.latent(), steps=2)
    graph.save(sampled, "sliced-auto.safetensors")
    graph.add("TestSaveText", text=[sampled[0], 1], path="sliced-auto.txt")
    comfy.run(graph.prompt)
    assert "tensor" not in comfy.output("sliced-auto.txt").read_text().lower()
