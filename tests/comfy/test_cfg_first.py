"""`auto` first splits the two prompts, whatever they carry: then the devices send each other almost nothing."""

from __future__ import annotations

import pytest

from any_graphs import AnyGraph
from any_runs import TOLERANCE, latents
from differences import relative_difference

SAMPLING = {"steps": 4, "cfg": 3.0}


def _area(graph: AnyGraph, prompt: list, lora: str) -> list:
    part = {"width": 0.5, "height": 1.0, "x": 0.0, "y": 0.0, "strength": 0.8}
    if graph.kind != "wan_t2v":
        return [graph.add("ConditioningSetAreaPercentage", conditioning=prompt, **part), 0]
    part |= {"temporal": 1.0, "z": 0.0}
    return [graph.add("ConditioningSetAreaPercentageVideo", conditioning=prompt, **part), 0]


def _mask(graph: AnyGraph, prompt: list, lora: str) -> list:
    mask = [graph.add("SolidMask", value=0.6, width=64, height=64), 0]
    how = {"strength": 0.9, "set_cond_area": "default"}
    return [graph.add("ConditioningSetMask", conditioning=prompt, mask=mask, **how), 0]


def _hook(graph: AnyGraph, prompt: list, lora: str) -> list:
    hook = [graph.add("CreateHookLoraModelOnly", lora_name=lora, strength_model=0.7), 0]
    return graph.hooked(prompt, hook)


def _range(graph: AnyGraph, prompt: list, lora: str) -> list:
    return [graph.add("ConditioningSetTimestepRange", conditioning=prompt, start=0.0, end=0.5), 0]


CARRIED = {"area": _area, "mask": _mask, "hook": _hook, "range of steps": _range}


@pytest.mark.parametrize(
    ("kind", "carried"),
    [("flux", "area"), ("flux", "hook"), ("unet", "mask"), ("unet", "range of steps"), ("wan_t2v", "area")],
)
def test_cfg_is_first_and_the_latent_is_stocks(comfy, loras, kind, carried):
    graph = AnyGraph(comfy, kind)
    positive, negative, latent = graph.request(1)
    both = graph.combined(CARRIED[carried](graph, positive, loras["kohya"]), positive)
    stock = graph.stock()
    ours = graph.parallel(stock, "cpu:2")
    sampler = graph.parallel_sampler([ours, 1], both, negative, latent, **SAMPLING)
    ways = {"stock": graph.ksampler(stock, both, negative, latent, **SAMPLING), "ours": sampler}
    found = latents(comfy, graph, ways, {"report": [sampler[0], 1]})
    assert relative_difference(found["ours"], found["stock"]) <= TOLERANCE
    assert found["report"].startswith("strategy: CFG 2: ")


def test_without_guidance_nothing_is_said_of_it(comfy):
    graph = AnyGraph(comfy, "unet")
    ours = graph.parallel(graph.stock(), "cpu:2")
    sampler = graph.parallel_sampler([ours, 1], *graph.request(1), steps=3, cfg=1.0)
    found = latents(comfy, graph, {"ours": sampler}, {"report": [sampler[0], 1]})
    assert found["ours"].isfinite().all() and "CFG" not in found["report"].splitlines()[0]
