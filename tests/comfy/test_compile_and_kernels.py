"""Compiled blocks and the attention kernel, chosen in the loaders and Parallel Model or by ComfyUI's TorchCompileModel.

The shared ComfyUI's ranks compile with torch's backend `eager` (conftest.py).
tests/engine/blocks/test_compile.py tests inductor.
"""

from __future__ import annotations

import re

import pytest
import torch

from any_graphs import AnyGraph
from any_runs import TOLERANCE, compared, latents, refusal
from differences import relative_difference
from graphs import STOCK, Graph

SAMPLING = {"cfg": 2.0}


@pytest.fixture(scope="module")
def unet(comfy):
    """A model of a size that no other test uses: compiled blocks of a known size would not be compiled again."""
    return comfy.write_flux("tiny_three_heads.safetensors", heads=3)


@pytest.fixture(scope="module")
def stock(comfy, unet):
    graph = Graph()
    latent = graph.ksampler(graph.model(STOCK, unet), *graph.request(width=18), **SAMPLING)
    return comfy.sample(graph.prompt, latent)


def loader(graph: Graph, unet: str, ring: bool = False, **inputs) -> str:
    strategy = graph.strategy("cpu:2", **({"ring": 2} if ring else {"cfg": 2}))
    return graph.add("ParallelFluxLoader", unet_name=unet, weight_dtype="auto", strategy=strategy, **inputs)


def stepwise(graph: Graph, unet: str, node: str | None = None, **inputs) -> list:
    """Adds KSampler on our MODEL, which the node `node` changes first if given."""
    model = [loader(graph, unet, **inputs), 1]
    if node is not None:
        model = [graph.add(node, model=model, backend="inductor"), 0]
    return graph.ksampler(model, *graph.request(width=18), **SAMPLING)


def resident(graph: Graph, unet: str, **inputs) -> list:
    return graph.parallel_sampler(loader(graph, unet, **inputs), *graph.request(width=18), **SAMPLING)


def sampled(comfy, unet: str, by=resident, **inputs) -> tuple[torch.Tensor, str]:
    """Returns the latent, and the report of Parallel Sampler."""
    graph = Graph()
    found = latents(comfy, graph, {"ours": by(graph, unet, **inputs)})
    return found["ours"], found.get("report", "")


def said(comfy) -> int:
    """Returns how often ComfyUI's log announced compiling for a latent of this size."""
    return comfy.server.log.read_text().count("compiling for a latent of 16 x 12 x 18")


def test_compiled_blocks_give_the_stock_latent_both_ways_and_are_kept(comfy, unet, stock):
    before = said(comfy)
    first, report = sampled(comfy, unet, compile="blocks", attention="torch", ring=True)
    assert relative_difference(first, stock) <= TOLERANCE
    assert "compile: 2 graphs in" in report and "attention: torch" in report and "result: exact" in report
    assert said(comfy) > before
    second, report = sampled(comfy, unet, compile="blocks", ring=True)
    assert torch.equal(second, first) and "compile: blocks (were compiled)" in report
    third, _ = sampled(comfy, unet, stepwise, compile="blocks", ring=True)
    assert relative_difference(third, stock) <= TOLERANCE


def test_auto_compiles_nothing_on_a_cpu(comfy, unet):
    for mode in ({}, {"compile": "auto"}):
        assert "compile" not in sampled(comfy, unet, ring=True, **mode)[1]


def test_torch_compile_model_compiles_where_the_blocks_are(comfy, unet, stock):
    before = said(comfy)
    compiled, _ = sampled(comfy, unet, stepwise, node="TorchCompileModel")
    assert relative_difference(compiled, stock) <= TOLERANCE
    assert said(comfy) > before  # a batch of one row per rank needs another graph than a batch of two


@pytest.mark.parametrize(
    ("by", "axis"), [("its input", "ulysses"), ("a node before", "ulysses"), ("its input", "tensor")]
)
def test_blocks_of_any_model_compile_and_give_the_stock_latent(comfy, by, axis):
    graph = AnyGraph(comfy, "wan_t2v")
    stock = source = graph.stock()
    inputs = {"compile": "blocks"}
    if by == "a node before":
        source, inputs = [graph.add("TorchCompileModel", model=stock, backend="inductor"), 0], {}
    ours = graph.add("ParallelModel", model=source, strategy=graph.strategy("cpu:2", **{axis: 2}), **inputs)
    ways = graph.sampled_by(
        {"stock": stock, "Parallel Sampler": [ours, 1]}, graph.request(), steps=2, cfg=3.0
    )
    report = compared(comfy, graph, ways)["report"]
    # One graph for all blocks, calls and steps; what was compiled is kept.
    assert re.search(r"compile: (1 graph in|blocks \(were compiled\))", report), report
    assert "uncompiled" not in report and "result: exact" in report
    assert "compiling for a latent of 16 x 3 x 9 x 7" in comfy.server.log.read_text()


@pytest.mark.parametrize("kernel", ["flash", "sage"])
def test_a_kernel_that_cannot_run_is_refused_with_the_remedy(comfy, unet, kernel):
    for by in (stepwise, resident):
        graph = Graph()
        failure = refusal(comfy, graph, by(graph, unet, attention=kernel))
        assert failure.exception_type.endswith("RequestError")
        assert f"attention {kernel} cannot run on cpu" in failure.exception_message
        assert "Choose attention auto or torch" in failure.exception_message
