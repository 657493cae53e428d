"""Every sampler and scheduler that this ComfyUI lists gives the stock latent for the same file, seed and sigmas."""

from __future__ import annotations

from itertools import product

import pytest

from any_runs import latents
from differences import relative_difference
from graphs import OURS, STOCK, Graph

TOLERANCE = 1e-4  # relative to the largest value of the stock latent, in fp32


@pytest.mark.timeout(900)
@pytest.mark.slow
def test_every_sampler_and_scheduler_gives_the_stock_latent(comfy, unet, subtests):
    """Each sampler runs with one scheduler in turn, because sigmas reach it as numbers; Euler runs with all. The model
    is behind Parallel Flux Loader and behind Parallel Model. test_nodes.py compares our lists with KSampler's."""
    inputs = comfy.registry["ParallelSampler"]["input"]["required"]
    samplers, all_schedulers = (inputs[name][1]["options"] for name in ("sampler_name", "scheduler"))
    assert len(samplers) >= 30 and len(all_schedulers) >= 8
    worst = {}
    for number, sampler in enumerate(samplers):
        schedulers = all_schedulers if sampler == "euler" else [all_schedulers[number % len(all_schedulers)]]
        graph = Graph()
        ours, stock = graph.model(OURS, unet, "cpu:2"), graph.model(STOCK, unet)
        any_model = graph.add("ParallelModel", model=stock, strategy=graph.strategy("cpu:2"))
        request = graph.text(1), graph.text(2), graph.latent()
        ways = {}
        for scheduler in schedulers:
            settings = {"sampler_name": sampler, "scheduler": scheduler, "steps": 3}
            ways |= {
                f"{scheduler} stock": graph.ksampler(stock, *request, **settings),
                f"{scheduler} KSampler": graph.ksampler(ours, *request, **settings),
                f"{scheduler} Parallel Sampler": graph.parallel_sampler([any_model, 1], *request, **settings),
            }
        found = latents(comfy, graph, ways)
        for scheduler, way in product(schedulers, ("KSampler", "Parallel Sampler")):
            with subtests.test(sampler=sampler, scheduler=scheduler, way=way):
                stock_latent = found[f"{scheduler} stock"]
                worst[sampler, scheduler, way] = relative_difference(
                    found[f"{scheduler} {way}"], stock_latent
                )
                assert worst[sampler, scheduler, way] <= TOLERANCE
    assert {(sampler, way) for sampler, _, way in worst} == set(
        product(samplers, ("KSampler", "Parallel Sampler"))
    )
    assert {scheduler for _, scheduler, _ in worst} == set(all_schedulers)
    for (sampler, scheduler, way), difference in sorted(worst.items(), key=lambda item: -item[1])[:10]:
        print(f"{sampler} {scheduler} {way}: {difference:.1e}")
