"""Every sampler and scheduler that this ComfyUI lists gives the stock latent for the same file, seed and sigmas."""

from __future__ import annotations

from itertools import product

import pytest

from any_runs import TOLERANCE, latents
from differences import relative_difference
from graphs import OURS, STOCK, Graph

TOGETHER = 12  # runs that share a prompt, each by three ways


@pytest.mark.timeout(900)
@pytest.mark.slow
def test_every_sampler_and_scheduler_gives_the_stock_latent(comfy, unet, subtests):
    """Each sampler runs with one scheduler in turn, because sigmas reach it as numbers; Euler runs with all. The model
    is behind Parallel Flux Loader and behind Parallel Model. test_nodes.py compares our lists with KSampler's."""
    inputs = comfy.registry["ParallelSampler"]["input"]["required"]
    samplers, schedulers = (inputs[name][1]["options"] for name in ("sampler_name", "scheduler"))
    assert len(samplers) >= 30 and len(schedulers) >= 8
    turns = [(sampler, schedulers[number % len(schedulers)]) for number, sampler in enumerate(samplers)]
    runs = list(dict.fromkeys([*turns, *product(["euler"], schedulers)]))
    worst = {}
    for first in range(0, len(runs), TOGETHER):
        together = runs[first : first + TOGETHER]
        graph = Graph()
        ours, stock = graph.model(OURS, unet, "cpu:2"), graph.model(STOCK, unet)
        any_model = graph.add("ParallelModel", model=stock, strategy=graph.strategy("cpu:2"))
        request = graph.request()
        ways = {}
        for sampler, scheduler in together:
            run = f"{sampler} {scheduler}"
            settings = {"sampler_name": sampler, "scheduler": scheduler, "steps": 3}
            ways |= {
                f"{run} stock": graph.ksampler(stock, *request, **settings),
                f"{run} KSampler": graph.ksampler(ours, *request, **settings),
                f"{run} Parallel Sampler": graph.parallel_sampler([any_model, 1], *request, **settings),
            }
        found = latents(comfy, graph, ways)
        for (sampler, scheduler), way in product(together, ("KSampler", "Parallel Sampler")):
            run = f"{sampler} {scheduler}"
            with subtests.test(sampler=sampler, scheduler=scheduler, way=way):
                difference = relative_difference(found[f"{run} {way}"], found[f"{run} stock"])
                worst[sampler, scheduler, way] = difference
                assert difference <= TOLERANCE
    assert worst.keys() == {(*run, way) for run, way in product(runs, ("KSampler", "Parallel Sampler"))}
    for (sampler, scheduler, way), difference in sorted(worst.items(), key=lambda item: -item[1])[:10]:
        print(f"{sampler} {scheduler} {way}: {difference:.1e}")
