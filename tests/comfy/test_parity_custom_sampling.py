"""Our MODEL gives the same latent as the stock MODEL in ComfyUI's other sampling workflows.

test_every_node.py tests each node that changes a model, a prompt or a guider on its own.
"""

from __future__ import annotations

import pytest

from any_runs import assert_same, latents
from graphs import OURS, STOCK, Graph


def _model_sampling_flux(graph: Graph, model: list) -> list:
    shifts = {"max_shift": 1.15, "base_shift": 0.5, "width": 1216, "height": 832}
    return [graph.add("ModelSamplingFlux", model=model, **shifts), 0]


def _advanced(graph: Graph, model: list, guider: str, sampler: str = "euler", **latent) -> list:
    """Returns the denoised output of SamplerCustomAdvanced, connected as in Flux workflows."""
    if guider == "BasicGuider":
        prompts = {"conditioning": graph.text(1)}
    else:
        prompts = {"positive": graph.text(1), "negative": graph.text(2, tokens=9), "cfg": 3.0}
    guider = graph.add(guider, model=model, **prompts)
    return [graph.custom_sampler(model, guider, sampler, graph.latent(**latent), "beta", 4), 1]


def basic_guider(graph: Graph, model: list) -> list:
    return _advanced(graph, _model_sampling_flux(graph, model), "BasicGuider", width=19, height=13)


def cfg_guider(graph: Graph, model: list) -> list:
    model = _model_sampling_flux(graph, model)
    return _advanced(graph, model, "CFGGuider", "euler_ancestral", draw=4, batch=3)


def first_steps_then_the_rest(graph: Graph, model: list) -> list:
    """Chains two KSamplerAdvanced: the first passes its leftover noise to the second."""
    request = {"positive": graph.text(1), "negative": graph.text(2), "model": model}
    request |= {
        "noise_seed": 5,
        "steps": 5,
        "cfg": 2.0,
        "sampler_name": "dpmpp_2m",
        "scheduler": "sgm_uniform",
    }
    first = {
        "add_noise": "enable",
        "start_at_step": 0,
        "end_at_step": 2,
        "return_with_leftover_noise": "enable",
    }
    rest = {
        "add_noise": "disable",
        "start_at_step": 2,
        "end_at_step": 10000,
        "return_with_leftover_noise": "disable",
    }
    begun = graph.add("KSamplerAdvanced", latent_image=graph.latent(draw=6), **request, **first)
    return [graph.add("KSamplerAdvanced", latent_image=[begun, 0], **request, **rest), 0]


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
    latent = graph.latent(draw=4, noise_mask=True)
    return graph.ksampler([patched, 0], graph.text(1), graph.text(2), latent, steps=5)


@pytest.mark.parametrize(
    "workflow",
    [basic_guider, cfg_guider, first_steps_then_the_rest, sampler_custom, differential_diffusion],
    ids=lambda workflow: workflow.__name__,
)
def test_a_stock_workflow_gives_the_stock_latent(comfy, unet, workflow):
    graph = Graph()
    found = latents(
        comfy, graph, {kind: workflow(graph, graph.model(kind, unet, "cpu:2")) for kind in (STOCK, OURS)}
    )
    assert found[STOCK].abs().max() > 0.1
    assert_same(found)


def test_model_sampling_flux_changes_our_model_too(comfy, unet):
    graph = Graph()
    model = graph.model(OURS, unet, "cpu:2")
    models = {"plain": model, "patched": _model_sampling_flux(graph, model)}
    found = latents(
        comfy, graph, {name: _advanced(graph, one, "BasicGuider") for name, one in models.items()}
    )
    assert (found["plain"] - found["patched"]).abs().max() > 0.01 * found["plain"].abs().max()
