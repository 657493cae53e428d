"""Runs of any model in the real ComfyUI: the same request with its stock loader alone, and through Parallel Model."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from torch import Tensor

from any_graphs import AnyGraph
from comfyui_client import PromptFailed
from differences import relative_difference
from graphs import Graph

TOLERANCE = 1e-4  # of the largest value of the stock latent, in fp32
TELLING = 1e-3  # least relative change of the stock latent by what a test is about


def latents(comfy, graph: Graph, found: dict[str, list], texts: dict[str, list] | None = None) -> dict:
    """Runs the graph and returns its outputs by name, and "report", that of the last Parallel Sampler. `found`: links
    to LATENTs or IMAGEs; `texts`: links to STRINGs."""
    texts = dict(texts or {})
    for name, latent in found.items():
        if graph.prompt[latent[0]]["class_type"] == "ParallelSampler":
            texts["report"] = [latent[0], 1]
        graph.save(latent, f"any-{name}.safetensors")
    for name, text in texts.items():
        graph.add("TestSaveText", text=text, path=f"any-{name}.txt")
    comfy.run(graph.prompt, timeout=300)
    loaded = {name: comfy.tensor(f"any-{name}.safetensors") for name in found}
    return loaded | {name: comfy.output(f"any-{name}.txt").read_text() for name in texts}


def sampled(comfy, unet: str, sampler: dict | None = None, **choice) -> tuple[Tensor, str]:
    """Returns the latent and the report of Parallel Sampler behind Parallel Flux Loader on two devices. `sampler`: its
    changed inputs; `choice`: settings of Strategy Selector."""
    graph = Graph()
    loader = graph.parallel_loader(unet, "cpu:2", **choice)
    latent = graph.parallel_sampler(loader, *graph.request(), **(sampler or {}))
    found = latents(comfy, graph, {"ours": latent})
    return found["ours"], found["report"]


def compared(comfy, graph: Graph, ways: dict[str, list], tolerance: float = TOLERANCE) -> dict:
    """Returns the outputs as `latents` does. Asserts that each latent is that of "stock", and that of "without" (the
    stock latent without what the test is about) is another."""
    found = latents(comfy, graph, ways)
    stock, told = found["stock"], found.get("report")
    assert stock.isfinite().all() and stock.std() > 1e-3
    for way in ways:
        difference = relative_difference(found[way], stock)
        if way == "without":
            assert difference > max(TELLING, 10 * tolerance), "it changes something"
        else:
            assert found[way].shape == stock.shape
            assert difference <= tolerance, f"{way}\n{told}"
    return found


def both(
    comfy,
    kind: str,
    choice: dict,
    *,
    batch: int = 1,
    request: Callable[[AnyGraph], tuple] = AnyGraph.request,
    uneven: bool = False,
    by: tuple[str, ...] = ("KSampler",),
    **sampling,
) -> dict:
    """Asserts that a model gives the same latents through Parallel Model, and returns them. `request`: returns links to
    the positive prompt, the negative one and the latent; `by`: "KSampler", "Parallel Sampler" or both."""
    graph = AnyGraph(comfy, kind)
    graph.uneven = uneven
    stock = graph.stock()
    ours = graph.parallel(stock, **choice)
    links = request(graph) if batch == 1 else request(graph, batch)
    models = {"stock": stock} | {way: [ours, int(way == "Parallel Sampler")] for way in by}
    return compared(comfy, graph, graph.sampled_by(models, links, **{"steps": 2, "cfg": 3.0, **sampling}))


def with_change(
    comfy,
    graph: AnyGraph,
    change: Callable[[AnyGraph, list], list],
    choice: dict,
    tolerance: float = TOLERANCE,
    **settings,
) -> dict:
    """Asserts that a change of the model counts before and behind Parallel Model as it does in stock; returns the
    latents and Parallel Sampler's report. `change`: adds nodes behind a MODEL and returns the MODEL of the last."""
    stock, request = graph.stock(), graph.request()
    changed = change(graph, stock)
    before = graph.parallel(changed, **choice)
    behind = change(graph, [graph.parallel(stock, **choice), 0])
    models = {"without": stock, "stock": changed, "Parallel Sampler": [before, 1], "behind": behind}
    return compared(comfy, graph, graph.sampled_by(models, request, **settings), tolerance)


def refusal(comfy, graph: Graph, latent: list, words: str = "") -> PromptFailed:
    """Returns the error of a prompt that samples `latent` and must fail. `words`: a regular expression that its message
    matches."""
    with pytest.raises(PromptFailed) as failure:
        comfy.sample(graph.prompt, latent)
    message = failure.value.exception_message
    assert re.search(words, message, re.DOTALL), message
    return failure.value
