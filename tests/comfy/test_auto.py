"""`auto` in the real ComfyUI first splits the two prompts, whatever they carry: then the devices send each other almost
nothing. With stored measurements a first run tries strategies, and the next one knows the fastest."""

from __future__ import annotations

import json
import re
import sqlite3
from contextlib import closing

import pytest

from any_graphs import MODELS, AnyGraph
from any_runs import compared, latents
from graphs import Graph
from tiny_vae import FLUX, write_vae

TIME = r"((?:[A-Z][A-Za-z]+|data|one) (?:\d|device)) ([\d.]+) s"
STEPS = 20


def _report(comfy, unet: str, seed: int, images: int = 1, cfg: float = 3.0) -> str:
    graph = Graph()
    loader = graph.parallel_loader(unet, "cpu:2")
    positive, negative, latent = graph.request()
    latent = [graph.add("RepeatLatentBatch", samples=latent, amount=images), 0]
    sampling = {"cfg": cfg, "seed": seed, "steps": STEPS}
    sampled = graph.parallel_sampler(loader, positive, negative, latent, **sampling)
    return latents(comfy, graph, {"ours": sampled})["report"]


def _tried(report: str) -> tuple[dict[str, float], str]:
    """Returns (seconds per step by strategy, the report's line) for the strategies that a run tried."""
    line = next(line for line in report.splitlines() if line.startswith("tried: "))
    times, _, _ = line.partition(";")
    return {name: float(seconds) for name, seconds in re.findall(TIME, times)}, line


def test_a_first_run_tries_strategies_and_the_next_one_begins_with_the_fastest(measuring):
    # A size that no other test here has: measurements count for all models of one size.
    unet = measuring.write_flux("tiny_tried.safetensors", single_blocks=3)
    first = _report(measuring, unet, 1)
    times, line = _tried(first)
    # How many of them are tried depends on how busy the machine is.
    assert "CFG 2" in times and set(times) <= {"one device", "CFG 2", "Ulysses 2", "Ring 2"}
    begun = "the fastest of those tried in this run, which began with "
    ran = re.match(rf"strategy: (.+): {begun}CFG 2: ", first)[1]
    assert times[ran] <= 1.03 * min(times.values())
    assert "kept for the next runs" in line and ("ran the rest" in line) != (ran == "CFG 2")
    assert "result: exact" in first and "memory, predicted for the fullest device: " in first
    assert _runs(measuring)

    second = _report(measuring, unet, 2)
    # The second run may try what the first one had no time for.
    known = r"(CFG 2|Ulysses 2|Ring 2|one device): measured before, a step takes "
    assert re.match(rf"strategy: (\S.*: {begun})?{known}", second)
    expected = (
        r"expected: [\d.e-]+ s per (step|model call) \(measured earlier\); this run took (\d+%|the same)"
    )
    assert re.search(expected, second) or "tried: " in second


def test_one_image_over_all_devices_and_one_on_each_compete_for_a_repeated_latent(measuring):
    unet = measuring.write_flux("tiny_batch.safetensors", single_blocks=2)
    report = _report(measuring, unet, 1, images=2, cfg=1.0)
    line = _tried(report)[1]
    assert line.startswith("tried: a step of 2 images took data 2 ")
    assert "Ulysses 2" in report  # on a busy machine it may be left to a later job
    assert ("times the images a second of data 2" in line) == ("none was faster" not in line)


def test_a_first_run_tries_the_ways_that_any_model_has(measuring):
    """A UNet has two ways to split a job: its prompts, and its images in bands."""
    graph = AnyGraph(measuring, "unet")
    ours = graph.parallel(graph.stock(), "cpu:2")
    latent = graph.parallel_sampler([ours, 1], *graph.request(), seed=1, steps=STEPS, cfg=3.0)
    tried, _ = _tried(latents(measuring, graph, {"ours": latent})["report"])
    assert set(tried) <= {"one device", "CFG 2", "bands 2"} and "CFG 2" in tried


def test_a_stock_ksampler_leaves_its_measurement_for_auto(measuring):
    """Each run leaves one measurement and tries no other strategy: this one was chosen by hand."""
    graph = AnyGraph(measuring, "sd3")
    ours = [graph.parallel(graph.stock(), ulysses=2), 0]
    sampled = graph.ksampler(ours, *graph.request(), steps=3, cfg=3.0)
    before = _runs(measuring)
    measuring.sample(graph.prompt, sampled, timeout=300)
    graph.prompt[sampled[0]]["inputs"]["seed"] = 8
    measuring.sample(graph.prompt, sampled, timeout=300)
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
    assert sorted(workload["reference_tokens"] for workload, *_ in added) == [0, tokens]


def test_a_size_that_is_decoded_again_is_tried_on_one_device_and_then_goes_the_faster_way(measuring):
    write_vae(measuring.models("vae") / "tried.safetensors", FLUX)
    size = {"width": 17, "height": 13, "batch": 1, "channels": FLUX.channels, "frames": 0}
    reports = []
    for draw in range(5):
        graph = Graph()
        vae = [graph.add("VAELoader", vae_name="tried.safetensors"), 0]
        latent = [graph.add("TestLatent", draw=200 + draw, batch_index="", noise_mask=False, **size), 0]
        stock = [graph.add("VAEDecode", samples=latent, vae=vae), 0]
        ours = graph.add("ParallelVAEDecode", samples=latent, vae=vae, strategy=graph.strategy("cpu:2"))
        found = latents(measuring, graph, {"stock": stock, "ours": [ours, 0]}, {"report": [ours, 1]})
        assert (found["ours"] - found["stock"]).abs().max() <= 1e-5
        reports.append(found["report"])
    ways = [re.match(r"decoded by: (\d)", one)[1] for one in reports]
    assert ways[:4] == ["2", "2", "1", "1"] and "tried on one device" in reports[2]
    ending = "than|as one device" if ways[4] == "2" else "the rows stay together, since shared out they took"
    assert re.search(ending, reports[4])
    stored = [strategy["ulysses_degree"] for _, strategy, engine, _ in _runs(measuring) if engine == "rows"]
    assert stored == [2, 1, int(ways[4])]  # the first of each is not stored: it pays one-time costs


def _runs(comfy) -> list[tuple]:
    """Returns the stored runs, oldest first: workload and strategy as dictionaries, engine, and seconds."""
    runs = []
    for path in (comfy.server.base_directory / "kept").glob("measurements-*.sqlite"):
        with closing(sqlite3.connect(path)) as database:
            rows = database.execute("SELECT workload, strategy, engine, seconds FROM runs ORDER BY rowid")
            runs += [
                (json.loads(workload), json.loads(strategy), *rest) for workload, strategy, *rest in rows
            ]
    return runs


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


def test_without_guidance_nothing_is_said_of_it(comfy):
    graph = AnyGraph(comfy, "unet")
    ours = graph.parallel(graph.stock(), "cpu:2")
    found = latents(comfy, graph, {"ours": graph.parallel_sampler([ours, 1], *graph.request(), cfg=1.0)})
    assert found["ours"].isfinite().all() and "CFG" not in found["report"].splitlines()[0]
