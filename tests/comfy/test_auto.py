"""`auto` in the real ComfyUI first splits the two prompts, whatever they carry: then the devices send each other almost
nothing. With stored measurements a first run tries strategies, and the next one knows the fastest."""

from __future__ import annotations

import json
import re
import sqlite3
from contextlib import closing

import pytest

from any_graphs import MODELS, AnyGraph
from any_runs import compared, sampled

TIME = r"((?:[A-Z][A-Za-z]+|data|one) (?:\d|device)) ([\d.]+) s"


def test_a_first_run_tries_strategies_and_the_next_one_begins_with_the_fastest(measuring):
    # A size that no other test here has: measurements count for all models of one size.
    unet = measuring.write_flux("tiny_tried.safetensors", single_blocks=3)
    _, first = sampled(measuring, unet, {"cfg": 3.0, "seed": 1, "steps": 20})
    line = next(line for line in first.splitlines() if line.startswith("tried: "))
    times = {name: float(seconds) for name, seconds in re.findall(TIME, line.partition(";")[0])}
    # How many of them are tried depends on how busy the machine is.
    assert "CFG 2" in times and set(times) <= {"one device", "CFG 2", "Ulysses 2", "Ring 2"}
    begun = "the fastest of those tried in this run, which began with "
    ran = re.match(rf"strategy: (.+): {begun}CFG 2: ", first)[1]
    assert times[ran] <= 1.03 * min(times.values())
    assert "kept for the next runs" in line and ("ran the rest" in line) != (ran == "CFG 2")
    assert "result: exact" in first and "memory, predicted for the fullest device: " in first
    assert _runs(measuring)

    _, second = sampled(measuring, unet, {"cfg": 3.0, "seed": 2, "steps": 20})
    # The second run may try what the first one had no time for.
    known = r"(CFG 2|Ulysses 2|Ring 2|one device): measured before, a step takes "
    assert re.match(rf"strategy: (\S.*: {begun})?{known}", second)
    expected = (
        r"expected: [\d.e-]+ s per (step|model call) \(measured earlier\); this run took (\d+%|the same)"
    )
    assert re.search(expected, second) or "tried: " in second


def test_a_stock_ksampler_leaves_its_measurement_for_auto(measuring):
    """Each run leaves one measurement and tries no other strategy: this one was chosen by hand."""
    graph = AnyGraph(measuring, "sd3")
    ours = [graph.parallel(graph.stock(), ulysses=2), 0]
    latent = graph.ksampler(ours, *graph.request(), steps=3, cfg=3.0)
    before = _runs(measuring)
    measuring.sample(graph.prompt, latent, timeout=300)
    graph.prompt[latent[0]]["inputs"]["seed"] = 8
    measuring.sample(graph.prompt, latent, timeout=300)
    assert len(_runs(measuring)) == len(before) + 2


def test_jobs_with_a_reference_image_are_measured_apart_from_those_without(measuring):
    kind, shape, tokens = "flux", "1,16,4,6", 6
    graph = AnyGraph(measuring, kind)
    ours = [graph.parallel(graph.stock(), ulysses=2), 0]
    plain, negative = (graph.text(draw, **MODELS[kind]["text"]) for draw in (1, 2))
    reference = [graph.add("TestShapedLatent", shape=shape, draw=20), 0]
    referring = [graph.add("ReferenceLatent", conditioning=plain, latent=reference), 0]
    latent = [graph.add("TestShapedLatent", shape=MODELS[kind]["latent"].format(b=1), draw=-1), 0]
    before = _runs(measuring)
    for positive in (plain, referring):
        measuring.sample(graph.prompt, graph.ksampler(ours, positive, negative, latent, steps=4, cfg=3.0))
    added = _runs(measuring)[len(before) :]
    assert sorted(workload["reference_tokens"] for workload in added) == [0, tokens]


def _runs(comfy) -> list[dict]:
    """Returns the workloads of the stored runs, oldest first."""
    workloads = []
    for path in (comfy.server.base_directory / "kept").glob("measurements-*.sqlite"):
        with closing(sqlite3.connect(path)) as database:
            workloads += [
                json.loads(one) for (one,) in database.execute("SELECT workload FROM runs ORDER BY rowid")
            ]
    return workloads


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
    ways = graph.sampled_by({"stock": stock, "Parallel Sampler": [ours, 1]}, request, **sampling)
    ways["without"] = graph.ksampler(stock, positive, negative, latent, **sampling)
    assert compared(comfy, graph, ways)["report"].startswith("strategy: CFG 2: ")
