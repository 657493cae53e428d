"""`auto` first splits the two prompts, whatever they carry: then the devices send each other almost nothing."""

from __future__ import annotations

import pytest

from any_graphs import AnyGraph
from any_runs import compared, latents

AREA = {"width": 0.5, "height": 1.0, "x": 0.0, "y": 0.0, "strength": 0.8}
# {what a prompt carries: (kind of model, class of the node that adds it, the node's inputs)}
CARRIED = {
    "area": ("flux", "ConditioningSetAreaPercentage", AREA),
    "hook": ("flux", "CreateHookLoraModelOnly", {"strength_model": 0.7}),
    "mask": ("unet", "ConditioningSetMask", {"strength": 0.9, "set_cond_area": "default"}),
    "range of steps": ("unet", "ConditioningSetTimestepRange", {"start": 0.0, "end": 0.5}),
    "area of a video": ("wan_t2v", "ConditioningSetAreaPercentageVideo", AREA | {"temporal": 1.0, "z": 0.0}),
}


@pytest.mark.parametrize("carried", CARRIED)
def test_cfg_is_first_and_the_latent_is_stocks(comfy, loras, carried):
    kind, node, inputs = CARRIED[carried]
    graph = AnyGraph(comfy, kind)
    (positive, negative, latent), other = graph.request(), graph.text_of(3)
    if carried == "hook":
        carrying = graph.hooked(other, [graph.add(node, lora_name=loras["kohya"], **inputs), 0])
    else:
        if carried == "mask":
            inputs = inputs | {"mask": [graph.add("SolidMask", value=0.6, width=64, height=64), 0]}
        carrying = [graph.add(node, conditioning=other, **inputs), 0]
    request, sampling = (graph.combined(carrying, positive), negative, latent), {"steps": 3, "cfg": 3.0}
    stock = graph.stock()
    ours = graph.parallel(stock, "cpu:2")
    ways = {
        "without": graph.ksampler(stock, positive, negative, latent, **sampling),
        "stock": graph.ksampler(stock, *request, **sampling),
        "ours": graph.parallel_sampler([ours, 1], *request, **sampling),
    }
    assert compared(comfy, graph, ways)["report"].startswith("strategy: CFG 2: ")


def test_without_guidance_nothing_is_said_of_it(comfy):
    graph = AnyGraph(comfy, "unet")
    ours = graph.parallel(graph.stock(), "cpu:2")
    found = latents(comfy, graph, {"ours": graph.parallel_sampler([ours, 1], *graph.request(), cfg=1.0)})
    assert found["ours"].isfinite().all() and "CFG" not in found["report"].splitlines()[0]
