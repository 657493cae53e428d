"""Idle ranks go to sleep when ComfyUI's memory manager frees memory, and the next prompt wakes them."""

from __future__ import annotations

import itertools

from any_runs import compared, latents, sampled
from graphs import OURS, STOCK, Graph
from waiting import wait_until

_SEEDS = itertools.count(100)  # a new seed per run, so that no cached output answers


WARM = "load: 0 s (weights were warm)"


def _again(comfy, unet: str) -> bool:
    """Samples and returns True if the ranks had to load the model."""
    return WARM not in sampled(comfy, unet, {"seed": next(_SEEDS)})[1]


def test_unload_models_puts_the_ranks_to_sleep_and_the_next_prompt_wakes_them(comfy, unet):
    _again(comfy, unet)
    assert not _again(comfy, unet)
    ranks = comfy.ranks()
    comfy.client.free()  # ComfyUI does it between prompts, after a moment
    wait_until(lambda: _again(comfy, unet))
    assert comfy.ranks() == ranks
    assert not _again(comfy, unet)


def test_memory_wanted_for_another_model_puts_the_ranks_to_sleep_but_under_highvram(comfy, unet):
    _again(comfy, unet)
    graph = Graph()
    model = graph.model(OURS, unet)  # the latest prompt's loader, so that the ranks stay warm
    held = graph.add("TestUnload", model=model)
    graph.add("TestSaveText", text=[held, 0], path="unloaded.txt")
    comfy.run(graph.prompt)
    assert comfy.output("unloaded.txt").read_text() == "held held gone"  # --highvram keeps it
    assert _again(comfy, unet)


def test_a_graph_without_the_model_gives_its_memory_back(comfy, unet):
    _again(comfy, unet)
    graph = Graph()
    graph.save(graph.latent(draw=next(_SEEDS)), "nothing.safetensors")
    comfy.run(graph.prompt)
    wait_until(lambda: "asleep" in {group["state"] for group in comfy.groups()})
    assert _again(comfy, unet)


def test_a_node_before_parallel_model_may_change_and_nothing_is_loaded_again(comfy, unet):
    reports = []
    for shift in (1.0, 2.0, 3.0):
        graph = Graph()
        shifts = {"max_shift": shift, "base_shift": 0.5, "width": 128, "height": 96}
        changed = graph.add("ModelSamplingFlux", model=graph.model(STOCK, unet), **shifts)
        model = graph.add("ParallelModel", model=[changed, 0], strategy=graph.strategy("cpu:2"))
        latent = graph.parallel_sampler([model, 1], *graph.request(), steps=2)
        reports.append(latents(comfy, graph, {"ours": latent})["report"])
    assert all(WARM in report for report in reports[1:]), reports


def test_two_models_in_one_graph_are_loaded_once_and_take_turns_in_every_prompt(comfy, unet):
    """They follow each other like a first pass and a refiner, and the ranks switch between them."""
    other = comfy.write_flux("tiny_refiner.safetensors", seed=3)

    def second_pass(by, models: list[list], request: tuple, seed: int) -> tuple[list, list]:
        first = by(models[0], *request, seed=seed, steps=2)
        return first, by(models[1], *request[:2], first, seed=seed, steps=2, denoise=0.6)

    reports = []
    for seed in (next(_SEEDS), next(_SEEDS)):
        graph = Graph()
        request, stock = graph.request(), [graph.model(STOCK, name) for name in (unet, other)]
        ours = [[graph.parallel_loader(name, "cpu:2"), 0] for name in (unet, other)]
        _, expected = second_pass(graph.ksampler, stock, request, seed)
        first, refined = second_pass(graph.parallel_sampler, ours, request, seed)
        graph.add("TestSaveText", text=[first[0], 1], path="first.txt")
        report = compared(comfy, graph, {"stock": expected, "ours": refined})["report"]
        reports.append({unet: comfy.output("first.txt").read_text(), other: report})
    for name, report in reports[1].items():
        assert WARM in report and f"switched to {name} (held, " in report
    assert "switched to" not in reports[0][other] and WARM not in reports[0][other]
