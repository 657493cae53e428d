"""Every sampler and scheduler that this ComfyUI lists, and its other sampling workflows, give the stock latent.

test_every_node.py tests each node that changes a model, a prompt or a guider on its own.
"""

from __future__ import annotations

import pytest

from any_runs import TOLERANCE, compared, latents
from differences import relative_difference
from graphs import OURS, STOCK, Graph

TOGETHER = 16  # runs that share a prompt, each on stock and on ours


@pytest.mark.timeout(900)
@pytest.mark.slow
def test_every_sampler_and_scheduler_gives_the_stock_latent(comfy, unet, subtests):
    """Each sampler runs with one scheduler in turn, because sigmas reach it as numbers. KSampler behind Parallel Flux
    Loader and Parallel Sampler behind Parallel Model take turns: both call one function of ComfyUI. test_nodes.py
    compares our lists with KSampler's."""
    inputs = comfy.registry["ParallelSampler"]["input"]["required"]
    samplers, schedulers = (inputs[name][1]["options"] for name in ("sampler_name", "scheduler"))
    assert len(samplers) >= 30 and 8 <= len(schedulers) < len(samplers)
    runs = [(sampler, schedulers[number % len(schedulers)]) for number, sampler in enumerate(samplers)]
    for first in range(0, len(runs), TOGETHER):
        together = runs[first : first + TOGETHER]
        graph, ways = Graph(), {}
        ours, stock = graph.model(OURS, unet, "cpu:2"), graph.model(STOCK, unet)
        any_model = graph.add("ParallelModel", model=stock, strategy=graph.strategy("cpu:2"))
        request = graph.request()
        for number, (sampler, scheduler) in enumerate(together):
            settings = {"sampler_name": sampler, "scheduler": scheduler, "steps": 3}
            ways[f"{sampler} stock"] = graph.ksampler(stock, *request, **settings)
            ways[f"{sampler} ours"] = (
                graph.parallel_sampler([any_model, 1], *request, **settings)
                if number % 2
                else graph.ksampler(ours, *request, **settings)
            )
        found = latents(comfy, graph, ways)
        for sampler, scheduler in together:
            with subtests.test(sampler=sampler, scheduler=scheduler):
                assert relative_difference(found[f"{sampler} ours"], found[f"{sampler} stock"]) <= TOLERANCE


def cfg_guider_for_a_batch(graph: Graph, model: list) -> list:
    """Returns the denoised output of SamplerCustomAdvanced, connected as in Flux workflows."""
    shifts = {"max_shift": 1.15, "base_shift": 0.5, "width": 1216, "height": 832}
    model = [graph.add("ModelSamplingFlux", model=model, **shifts), 0]
    prompts = {"positive": graph.text(1), "negative": graph.text(2, tokens=9)}
    guider = graph.add("CFGGuider", model=model, cfg=3.0, **prompts)
    latent = graph.latent(width=19, height=13, draw=4, batch=3)
    return [graph.custom_sampler(model, guider, "euler_ancestral", latent, "beta", 4), 1]


def first_steps_then_the_rest(graph: Graph, model: list) -> list:
    """Chains two KSamplerAdvanced: the first passes its leftover noise to the second."""
    request = {
        "positive": graph.text(1),
        "negative": graph.text(2),
        "model": model,
        "noise_seed": 5,
        "steps": 5,
    }
    request |= {"cfg": 2.0, "sampler_name": "dpmpp_2m", "scheduler": "sgm_uniform"}
    first = {"add_noise": "enable", "start_at_step": 0, "end_at_step": 2}
    rest = {"add_noise": "disable", "start_at_step": 2, "end_at_step": 10000}
    latent = graph.latent(draw=6)
    for part, leftover in ((first, "enable"), (rest, "disable")):
        inputs = {"latent_image": latent, "return_with_leftover_noise": leftover}
        latent = [graph.add("KSamplerAdvanced", **request, **part, **inputs), 0]
    return latent


def sampler_custom(graph: Graph, model: list) -> list:
    parts = {
        "positive": graph.text(1),
        "negative": graph.text(2),
        "sampler": [graph.add("KSamplerSelect", sampler_name="heun"), 0],
        "sigmas": [graph.add("BasicScheduler", model=model, scheduler="simple", steps=3, denoise=1.0), 0],
        "latent_image": graph.latent(),
    }
    return [graph.add("SamplerCustom", model=model, add_noise=True, noise_seed=9, cfg=2.5, **parts), 0]


def differential_diffusion(graph: Graph, model: list) -> list:
    patched = graph.add("DifferentialDiffusion", model=model, strength=1.0)
    return graph.ksampler([patched, 0], *graph.request(draw=4, noise_mask=True), steps=5)


@pytest.mark.parametrize(
    "workflow",
    [cfg_guider_for_a_batch, first_steps_then_the_rest, sampler_custom, differential_diffusion],
    ids=lambda workflow: workflow.__name__,
)
def test_a_stock_workflow_gives_the_stock_latent(comfy, unet, workflow):
    graph = Graph()
    ways = {kind: workflow(graph, graph.model(kind, unet, "cpu:2")) for kind in (STOCK, OURS)}
    compared(comfy, graph, ways)
