"""Our MODEL gives the same latent as the stock MODEL in ComfyUI's other sampling workflows."""

from __future__ import annotations

import pytest

from any_runs import assert_same, latents
from graphs import OURS, STOCK, Graph


def advanced(
    graph: Graph, model: list, guider: str, sampler: str = "euler", draw: int = -1, **latent
) -> list:
    """Returns the denoised output of SamplerCustomAdvanced, connected as in Flux workflows."""
    positive, negative = graph.text(1), graph.text(2, tokens=9)
    if guider == "BasicGuider":
        node = graph.add("BasicGuider", model=model, conditioning=positive)
    else:
        node = graph.add("CFGGuider", model=model, positive=positive, negative=negative, cfg=3.0)
    parts = {
        "noise": [graph.add("RandomNoise", noise_seed=3), 0],
        "sampler": [graph.add("KSamplerSelect", sampler_name=sampler), 0],
        "sigmas": [graph.add("BasicScheduler", model=model, scheduler="beta", steps=4, denoise=1.0), 0],
        "latent_image": graph.latent(draw=draw, **latent),
    }
    return [graph.add("SamplerCustomAdvanced", guider=[node, 0], **parts), 1]


def model_sampling_flux(graph: Graph, model: list) -> list:
    patched = graph.add(
        "ModelSamplingFlux", model=model, max_shift=1.15, base_shift=0.5, width=1216, height=832
    )
    return [patched, 0]


def ksampler_advanced(graph: Graph, model: list, latent: list, **changes) -> list:
    inputs = {
        "add_noise": "enable",
        "noise_seed": 5,
        "steps": 5,
        "cfg": 2.0,
        "sampler_name": "dpmpp_2m",
        "scheduler": "sgm_uniform",
        "start_at_step": 0,
        "end_at_step": 10000,
        "return_with_leftover_noise": "disable",
        **changes,
    }
    conditioning = {"positive": graph.text(1), "negative": graph.text(2), "latent_image": latent}
    return [graph.add("KSamplerAdvanced", model=model, **conditioning, **inputs), 0]


def basic_guider(graph, model):
    return advanced(graph, model, "BasicGuider")


def basic_guider_after_model_sampling_flux(graph, model):
    return advanced(graph, model_sampling_flux(graph, model), "BasicGuider", width=19, height=13)


def cfg_guider(graph, model):
    return advanced(graph, model, "CFGGuider", sampler="dpmpp_2m", batch=3)


def cfg_guider_after_model_sampling_flux(graph, model):
    return advanced(graph, model_sampling_flux(graph, model), "CFGGuider", sampler="euler_ancestral", draw=4)


def first_steps_then_the_rest(graph, model):
    """Chains two KSamplerAdvanced: the first passes its leftover noise to the second."""
    begun = ksampler_advanced(
        graph, model, graph.latent(draw=6), end_at_step=2, return_with_leftover_noise="enable"
    )
    return ksampler_advanced(graph, model, begun, add_noise="disable", start_at_step=2)


def two_prompts_in_areas(graph, model):
    left = graph.add(
        "ConditioningSetArea", conditioning=graph.text(1), width=64, height=96, x=0, y=0, strength=1.0
    )
    both = graph.add("ConditioningCombine", conditioning_1=[left, 0], conditioning_2=graph.text(3))
    return graph.ksampler(model, [both, 0], graph.text(2), graph.latent(), cfg=3.0)


def a_prompt_for_half_of_the_steps(graph, model):
    early = graph.add("ConditioningSetTimestepRange", conditioning=graph.text(1), start=0.0, end=0.5)
    late = graph.add("ConditioningSetTimestepRange", conditioning=graph.text(3), start=0.5, end=1.0)
    both = graph.add("ConditioningCombine", conditioning_1=[early, 0], conditioning_2=[late, 0])
    return graph.ksampler(model, [both, 0], graph.text(2), graph.latent(), steps=6)


def rescaled_cfg(graph, model):
    """Samples behind a node that replaces the CFG function."""
    rescaled = graph.add("RescaleCFG", model=model, multiplier=0.7)
    return graph.ksampler([rescaled, 0], graph.text(1), graph.text(2), graph.latent(), cfg=3.0)


def sampler_custom(graph, model):
    sampler = [graph.add("KSamplerSelect", sampler_name="heun"), 0]
    node = graph.add(
        "SamplerCustom",
        model=model,
        add_noise=True,
        noise_seed=9,
        cfg=2.5,
        positive=graph.text(1),
        negative=graph.text(2),
        sampler=sampler,
        sigmas=_sigmas(graph, model),
        latent_image=graph.latent(),
    )
    return [node, 0]


def _sigmas(graph, model):
    return [graph.add("BasicScheduler", model=model, scheduler="simple", steps=3, denoise=1.0), 0]


def dual_cfg_guider(graph, model):
    guider = graph.add(
        "DualCFGGuider",
        model=model,
        cond1=graph.text(1),
        cond2=graph.text(3),
        negative=graph.text(2),
        cfg_conds=3.0,
        cfg_cond2_negative=1.5,
        style="regular",
    )
    node = graph.add(
        "SamplerCustomAdvanced",
        guider=[guider, 0],
        noise=[graph.add("RandomNoise", noise_seed=3), 0],
        sampler=[graph.add("KSamplerSelect", sampler_name="euler"), 0],
        sigmas=_sigmas(graph, model),
        latent_image=graph.latent(),
    )
    return [node, 0]


def prompts_after_each_other(graph, model):
    joined = graph.add("ConditioningConcat", conditioning_to=graph.text(1), conditioning_from=graph.text(3))
    return graph.ksampler(model, [joined, 0], graph.text(2), graph.latent(), cfg=2.0)


def an_average_of_prompts(graph, model):
    between = graph.add(
        "ConditioningAverage",
        conditioning_to=graph.text(1),
        conditioning_from=graph.text(3),
        conditioning_to_strength=0.4,
    )
    guided = graph.add("FluxGuidance", conditioning=[between, 0], guidance=2.2)
    return graph.ksampler(model, [guided, 0], graph.text(2), graph.latent())


def a_prompt_behind_a_mask(graph, model):
    mask = [graph.add("SolidMask", value=0.6, width=128, height=96), 0]
    masked = graph.add(
        "ConditioningSetMask", conditioning=graph.text(1), mask=mask, strength=0.9, set_cond_area="default"
    )
    both = graph.add("ConditioningCombine", conditioning_1=[masked, 0], conditioning_2=graph.text(3))
    return graph.ksampler(model, [both, 0], graph.text(2), graph.latent(), cfg=2.0)


def differential_diffusion(graph, model):
    patched = graph.add("DifferentialDiffusion", model=model, strength=1.0)
    latent = graph.latent(draw=4, noise_mask=True)
    return graph.ksampler([patched, 0], graph.text(1), graph.text(2), latent, steps=5)


def a_noise_mask(graph, model):
    mask = [graph.add("SolidMask", value=0.5, width=128, height=96), 0]
    latent = graph.add("SetLatentNoiseMask", samples=graph.latent(draw=4), mask=mask)
    return graph.ksampler(model, graph.text(1), graph.text(2), [latent, 0], denoise=0.8)


@pytest.mark.parametrize(
    "workflow",
    [
        basic_guider,
        basic_guider_after_model_sampling_flux,
        cfg_guider,
        cfg_guider_after_model_sampling_flux,
        first_steps_then_the_rest,
        two_prompts_in_areas,
        a_prompt_for_half_of_the_steps,
        rescaled_cfg,
        sampler_custom,
        dual_cfg_guider,
        prompts_after_each_other,
        an_average_of_prompts,
        a_prompt_behind_a_mask,
        differential_diffusion,
        a_noise_mask,
    ],
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
    plain = comfy.sample(graph.prompt, advanced(graph, model, "BasicGuider"))
    patched = comfy.sample(graph.prompt, advanced(graph, model_sampling_flux(graph, model), "BasicGuider"))
    assert (plain - patched).abs().max() > 0.01 * plain.abs().max()
