"""Runs of any model in the real ComfyUI: the same request with its stock loader alone, and through Parallel Model."""

from __future__ import annotations

from collections.abc import Callable

from safetensors.torch import load_file

from any_graphs import MODELS, AnyGraph
from differences import relative_difference
from graphs import Graph

TOLERANCE = 1e-4  # of the largest value of the stock latent, in fp32


def latents(comfy, graph: Graph, found: dict[str, list], texts: dict[str, list] | None = None) -> dict:
    """Runs the graph and returns its outputs by name. `found`: links to LATENTs; `texts`: links to STRINGs."""
    several = isinstance(graph, AnyGraph) and ";" in MODELS[graph.kind]["latent"]
    for name, latent in found.items():
        if several:
            latent = [graph.add("TestFlatLatent", latent=latent), 0]
        graph.save(latent, f"any-{name}.safetensors")
    for name, text in (texts or {}).items():
        graph.add("TestSaveText", text=text, path=f"any-{name}.txt")
    comfy.run(graph.prompt, timeout=300)
    loaded = {name: load_file(comfy.output(f"any-{name}.safetensors"))["samples"] for name in found}
    return loaded | {name: comfy.output(f"any-{name}.txt").read_text() for name in texts or {}}


def both(
    comfy,
    kind: str,
    choice: dict,
    *,
    batch: int = 1,
    request: Callable[[AnyGraph], tuple] = AnyGraph.request,
    devices: str | None = None,
    uneven: bool = False,
    with_sampler: bool = False,
    **sampling,
) -> dict:
    """Returns the latents of one request, stock and through Parallel Model. `request`: returns links to the positive
    prompt, the negative one and the latent; `with_sampler`: True for Parallel Sampler's latent and report as well."""
    graph = AnyGraph(comfy, kind)
    graph.uneven = uneven
    stock = graph.stock()
    ours = graph.parallel(stock, devices, **choice)
    links = request(graph) if batch == 1 else request(graph, batch)
    settings = {"steps": 2, "cfg": 3.0, **sampling}
    ways = {
        "stock": graph.ksampler(stock, *links, **settings),
        "ours": graph.ksampler([ours, 0], *links, **settings),
    }
    if not with_sampler:
        return latents(comfy, graph, ways)
    sampler = graph.parallel_sampler([ours, 1], *links, **settings)
    return latents(comfy, graph, ways | {"Parallel Sampler": sampler}, {"report": [sampler[0], 1]})


def assert_same(found: dict) -> None:
    assert found["stock"].isfinite().all() and found["stock"].std() > 1e-3
    for way in ("ours", "Parallel Sampler"):
        if way in found:
            assert found[way].shape == found["stock"].shape
            assert relative_difference(found[way], found["stock"]) <= TOLERANCE, way
