"""Graphs people build: the same nodes around stock UNETLoader and around our MODEL or ParallelSampler, in fp32."""

from __future__ import annotations

import pytest
from graphs import OURS, STOCK, Graph
from test_stock_baseline import relative_difference

TOLERANCE = 1e-4
STEPWISE, RESIDENT = "MODEL", "ParallelSampler"


@pytest.fixture(scope="module")
def unet(comfy):
    return comfy.write_flux("tiny_dev.safetensors")


@pytest.fixture(scope="module")
def schnell(comfy):
    return comfy.write_flux("tiny_schnell.safetensors", guidance=False)


def _sampled(comfy, way: str, unet: str, conditions, strategy=None, **settings):
    """The latent of one graph; `conditions(graph)` gives (positive, negative, latent)."""
    graph = Graph()
    positive, negative, latent = conditions(graph)
    if way == RESIDENT:
        loader = graph.parallel_loader(unet, "cpu:2", **(strategy or {}))
        result = graph.parallel_sampler(loader, positive, negative, latent, **settings)
        samples, report = comfy.sample_with_text(graph.prompt, result, [result[0], 1])
        return samples, report
    model = graph.model(STOCK if way == STOCK else OURS, unet, **(strategy or {}))
    return comfy.sample(graph.prompt, graph.ksampler(model, positive, negative, latent, **settings)), ""


def _plain(g):
    return g.text(1), g.text(2), g.latent()


CASES = {
    "cfg 4": (_plain, {"cfg": 4.0}),
    "cfg 4, texts of different length": (
        lambda g: (g.text(1, tokens=9), g.text(2, tokens=5), g.latent()),
        {"cfg": 4.0},
    ),
    "odd sides": (lambda g: (g.text(1), g.text(2), g.latent(width=13, height=9)), {"cfg": 4.0}),
    "tokens that do not divide": (lambda g: (g.text(1), g.text(2), g.latent(width=14, height=10)), {}),
    "batch 3": (lambda g: (g.text(1), g.text(2), g.latent(batch=3)), {"cfg": 2.0}),
    "batch index": (lambda g: (g.text(1), g.text(2), g.latent(batch=2, batch_index="3,1")), {}),
    "image to image": (lambda g: (g.text(1), g.text(2), g.latent(draw=5)), {"denoise": 0.6, "steps": 4}),
    "inpaint": (
        lambda g: (g.text(1), g.text(2), g.latent(draw=5, noise_mask=True)),
        {"denoise": 0.8, "steps": 4, "cfg": 2.0},
    ),
    "no guidance given": (lambda g: (g.text(1, guidance=-1.0), g.text(2), g.latent()), {}),
    "heun with cfg": (_plain, {"cfg": 3.0, "sampler_name": "heun"}),
    "ancestral, batch 2": (
        lambda g: (g.text(1), g.text(2), g.latent(batch=2)),
        {"sampler_name": "euler_ancestral", "seed": 11},
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("way", [STEPWISE, RESIDENT])
def test_the_latent_equals_stock(comfy, unet, way, case):
    conditions, settings = CASES[case]
    expected, _ = _sampled(comfy, STOCK, unet, conditions, **settings)
    latent, report = _sampled(comfy, way, unet, conditions, **settings)
    assert latent.shape == expected.shape
    assert relative_difference(latent, expected) <= TOLERANCE
    if way == RESIDENT:
        assert "way: resident" in report


@pytest.mark.parametrize("way", [STEPWISE, RESIDENT])
def test_schnell_equals_stock(comfy, schnell, way):
    settings = {"cfg": 1.0, "steps": 4}
    expected, _ = _sampled(comfy, STOCK, schnell, _plain, **settings)
    latent, _ = _sampled(comfy, way, schnell, _plain, **settings)
    assert relative_difference(latent, expected) <= TOLERANCE


@pytest.mark.parametrize(
    "degrees", [{"ring": 2}, {"cfg": 2}, {"ulysses": 2}, {"data": 2}], ids=lambda d: next(iter(d))
)
def test_every_manual_strategy_equals_stock(comfy, unet, degrees):
    def conditions(g):
        return g.text(1), g.text(2), g.latent(width=13, height=9, batch=2)

    expected, _ = _sampled(comfy, STOCK, unet, conditions, cfg=4.0)
    for way in (STEPWISE, RESIDENT):
        latent, _ = _sampled(comfy, way, unet, conditions, strategy=degrees, cfg=4.0)
        assert relative_difference(latent, expected) <= TOLERANCE


def test_another_guidance_gives_another_latent(comfy, unet):
    """The negative control: the comparison sees what it should."""
    one, _ = _sampled(comfy, RESIDENT, unet, lambda g: (g.text(1, guidance=3.0), g.text(2), g.latent()))
    other, _ = _sampled(comfy, STOCK, unet, lambda g: (g.text(1, guidance=3.5), g.text(2), g.latent()))
    assert relative_difference(one, other) > 10 * TOLERANCE


def test_the_report_tells_what_ran(comfy, unet):
    _, report = _sampled(comfy, RESIDENT, unet, _plain, cfg=4.0)
    for part in ("CFG 2", "resident", "native", "median", "first", "load", "MiB", "device-seconds"):
        assert part in report
    _, report = _sampled(comfy, RESIDENT, unet, _plain, sampler_name="lms")
    assert "way: stepwise (the sampler lms runs in ComfyUI)" in report


def _custom_advanced(comfy, kind, unet, guider, **shift):
    graph = Graph()
    model = graph.model(kind, unet)
    if shift:
        model = [graph.add("ModelSamplingFlux", model=model, **shift), 0]
    positive, negative, latent = _plain(graph)
    if guider == "BasicGuider":
        guide = graph.add("BasicGuider", model=model, conditioning=positive)
    else:
        guide = graph.add("CFGGuider", model=model, positive=positive, negative=negative, cfg=3.0)
    result = graph.add(
        "SamplerCustomAdvanced",
        noise=[graph.add("RandomNoise", noise_seed=3), 0],
        guider=[guide, 0],
        sampler=[graph.add("KSamplerSelect", sampler_name="dpmpp_2m"), 0],
        sigmas=[graph.add("BasicScheduler", model=model, scheduler="beta", steps=4, denoise=1.0), 0],
        latent_image=latent,
    )
    return comfy.sample(graph.prompt, [result, 0])


@pytest.mark.parametrize("guider", ["BasicGuider", "CFGGuider"])
@pytest.mark.parametrize(
    "shift",
    [{}, {"max_shift": 1.15, "base_shift": 0.5, "width": 512, "height": 512}],
    ids=["plain", "ModelSamplingFlux"],
)
def test_sampler_custom_advanced_drives_our_model(comfy, unet, guider, shift):
    expected = _custom_advanced(comfy, STOCK, unet, guider, **shift)
    assert relative_difference(_custom_advanced(comfy, OURS, unet, guider, **shift), expected) <= TOLERANCE


def _advanced(comfy, kind, unet):
    graph = Graph()
    model, (positive, negative, latent) = graph.model(kind, unet), _plain(graph)
    settings = dict(
        model=model,
        positive=positive,
        negative=negative,
        steps=6,
        cfg=1.0,
        sampler_name="euler",
        scheduler="simple",
    )
    first = graph.add(
        "KSamplerAdvanced",
        add_noise="enable",
        noise_seed=3,
        start_at_step=0,
        end_at_step=3,
        return_with_leftover_noise="enable",
        latent_image=latent,
        **settings,
    )
    second = graph.add(
        "KSamplerAdvanced",
        add_noise="disable",
        noise_seed=0,
        start_at_step=3,
        end_at_step=10000,
        return_with_leftover_noise="disable",
        latent_image=[first, 0],
        **settings,
    )
    return comfy.sample(graph.prompt, [second, 0])


def test_ksampler_advanced_splits_the_steps(comfy, unet):
    expected = _advanced(comfy, STOCK, unet)
    assert relative_difference(_advanced(comfy, OURS, unet), expected) <= TOLERANCE


def test_combined_conditioning_runs_stepwise_and_equals_stock(comfy, unet):
    def conditions(g):
        both = g.add("ConditioningCombine", conditioning_1=g.text(1), conditioning_2=g.text(3))
        return [both, 0], g.text(2), g.latent()

    expected, _ = _sampled(comfy, STOCK, unet, conditions, cfg=2.0)
    latent, report = _sampled(comfy, RESIDENT, unet, conditions, cfg=2.0)
    assert relative_difference(latent, expected) <= TOLERANCE
    assert "the positive conditioning combines 2 prompts" in report
