"""Every sampler and scheduler that this ComfyUI lists gives the stock latent for the same file, seed and sigmas."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file

from graphs import OURS, STOCK, Graph

PARALLEL_SAMPLER = ("euler", "euler_ancestral", "heun", "dpmpp_2m")  # these run under it as well
EVERY_SCHEDULER = ("euler", "dpmpp_2m")
TOLERANCE = 1e-4  # relative to the largest value of the stock latent, in fp32


@pytest.fixture(scope="module")
def lists(comfy):
    """The lists (samplers, schedulers) of KSampler's inputs."""
    required = comfy.client.object_info()["KSampler"]["input"]["required"]
    return tuple(_options(required[name]) for name in ("sampler_name", "scheduler"))


def _options(entry) -> list[str]:
    """Returns the options of a combo, which is [[options], …] or ["COMBO", {"options": […]}]."""
    return entry[1]["options"] if entry[0] == "COMBO" else entry[0]


@pytest.mark.timeout(900)
@pytest.mark.slow
def test_every_sampler_and_scheduler_gives_the_stock_latent(comfy, unet, lists, subtests):
    """Each sampler runs with one scheduler in turn, because sigmas reach it as numbers. EVERY_SCHEDULER names samplers
    that run with all. The model is behind Parallel Flux Loader and behind Parallel Model."""
    samplers, all_schedulers = lists
    assert len(samplers) >= 30 and len(all_schedulers) >= 8
    worst = {}
    for number, sampler in enumerate(samplers):
        schedulers = (
            all_schedulers if sampler in EVERY_SCHEDULER else [all_schedulers[number % len(all_schedulers)]]
        )
        graph = Graph()
        ours, stock = graph.model(OURS, unet, "cpu:2"), graph.model(STOCK, unet)
        any_model = graph.add("ParallelModel", model=stock, strategy=graph.strategy("cpu:2"))
        request = graph.text(1), graph.text(2), graph.latent()
        for scheduler in schedulers:
            settings = {"sampler_name": sampler, "scheduler": scheduler, "steps": 3}
            ways = {
                "stock": graph.ksampler(stock, *request, **settings),
                "KSampler": graph.ksampler(ours, *request, **settings),
                "Parallel Model": graph.parallel_sampler([any_model, 1], *request, **settings),
            }
            if sampler in PARALLEL_SAMPLER:
                ways["Parallel Sampler"] = graph.parallel_sampler(ours[0], *request, **settings)
            for way, result in ways.items():
                graph.save(result, f"{sampler}-{scheduler}-{way}.safetensors")
        comfy.run(graph.prompt, timeout=300)
        for scheduler in schedulers:
            stock_latent = load_file(comfy.output(f"{sampler}-{scheduler}-stock.safetensors"))["samples"]
            for way in list(ways)[1:]:
                with subtests.test(sampler=sampler, scheduler=scheduler, way=way):
                    name = f"{sampler}-{scheduler}-{way}"
                    latent = load_file(comfy.output(f"{name}.safetensors"))["samples"]
                    difference = ((latent - stock_latent).abs().max() / stock_latent.abs().max()).item()
                    worst[sampler, scheduler, way] = difference
                    assert difference <= TOLERANCE
    for way, its_samplers in (
        ("KSampler", samplers),
        ("Parallel Model", samplers),
        ("Parallel Sampler", PARALLEL_SAMPLER),
    ):
        met = [(sampler, scheduler) for sampler, scheduler, of in worst if of == way]
        assert [set(names) for names in zip(*met, strict=True)] == [set(its_samplers), set(all_schedulers)]
    for (sampler, scheduler, way), difference in sorted(worst.items(), key=lambda item: -item[1])[:10]:
        print(f"{sampler} {scheduler} {way}: {difference:.1e}")
