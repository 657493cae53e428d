"""Parallel Sampler in the real ComfyUI gives the stock latent for models of any family."""

from __future__ import annotations

import re

import pytest
import torch

from any_graphs import AnyGraph
from any_runs import TOLERANCE, latents
from comfyui_client import PromptInterrupted
from differences import relative_difference


def area(graph: AnyGraph, positive: list, **inputs) -> list:
    other = [graph.add("ConditioningSetArea", conditioning=graph.prompt_of(3), **inputs), 0]
    return [graph.add("ConditioningCombine", conditioning_1=positive, conditioning_2=other), 0]


def masked(graph: AnyGraph, positive: list) -> list:
    mask = [graph.add("SolidMask", value=0.7, width=24, height=32), 0]
    other = graph.add(
        "ConditioningSetMask",
        conditioning=graph.prompt_of(3),
        mask=mask,
        strength=0.8,
        set_cond_area="default",
    )
    return [graph.add("ConditioningCombine", conditioning_1=positive, conditioning_2=[other, 0]), 0]


def timed(graph: AnyGraph, positive: list) -> list:
    first = graph.add("ConditioningSetTimestepRange", conditioning=positive, start=0.0, end=0.5)
    then = graph.add("ConditioningSetTimestepRange", conditioning=graph.prompt_of(3), start=0.5, end=1.0)
    return [graph.add("ConditioningCombine", conditioning_1=[first, 0], conditioning_2=[then, 0]), 0]


PROMPTS = {
    "an area": lambda graph, positive: area(graph, positive, width=64, height=64, x=32, y=64, strength=1.5),
    "a mask": masked,
    "a range of steps": timed,
}


def both(comfy, graph: AnyGraph, request, sampling, change=lambda model: model) -> dict:
    """Returns the latents of KSampler and Parallel Sampler ("stock", "ours"), and the latter's report ("report")."""
    stock = change(graph.stock())
    ours = graph.parallel(stock, cfg=2)
    sampler = graph.parallel_sampler([ours, 1], *request, **sampling)
    return latents(
        comfy,
        graph,
        {"stock": graph.ksampler(stock, *request, **sampling), "ours": sampler},
        {"report": [sampler[0], 1]},
    )


def assert_same(found: dict) -> None:
    assert relative_difference(found["ours"], found["stock"]) <= TOLERANCE, found["report"]


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_for_parts_of_the_image_or_of_the_run_are_data_too(comfy, name):
    graph = AnyGraph(comfy, "unet")
    positive, negative = graph.prompt_of(1), graph.prompt_of(2)
    latent = [graph.add("TestShapedLatent", shape="1,4,16,12", draw=-1), 0]
    request = (PROMPTS[name](graph, positive), negative, latent)
    found = both(comfy, graph, request, {"steps": 4, "cfg": 3.0, "sampler_name": "dpmpp_2m"})
    assert_same(found)
    assert "result: exact" in found["report"]


def test_inpainting_image_to_image_and_batches(comfy):
    graph = AnyGraph(comfy, "sd3")
    positive, negative, _ = graph.request()
    latent = graph.latent(width=9, height=11, batch=2, draw=5, noise_mask=True)
    sampling = {"steps": 5, "cfg": 3.0, "denoise": 0.6, "sampler_name": "euler_ancestral"}
    assert_same(both(comfy, graph, (positive, negative, latent), sampling))


def test_another_sampling_of_comfyuis_own_goes_along(comfy):
    """SD3 gets another shift. The UNet gets v-prediction with discrete steps, the last of them pure noise (zsnr)."""
    graph = AnyGraph(comfy, "sd3")
    found = both(
        comfy,
        graph,
        graph.request(),
        {"steps": 3, "cfg": 3.0, "sampler_name": "res_multistep"},
        lambda model: [graph.add("ModelSamplingSD3", model=model, shift=7.0), 0],
    )
    assert_same(found)
    graph = AnyGraph(comfy, "unet")
    found = both(
        comfy,
        graph,
        graph.request(),
        {"steps": 3, "cfg": 3.0, "sampler_name": "dpmpp_2m_sde"},
        lambda model: [
            graph.add("ModelSamplingDiscrete", model=model, sampling="v_prediction", zsnr=True),
            0,
        ],
    )
    assert_same(found)


@pytest.mark.parametrize(
    ("node", "inputs"),
    [
        ("RescaleCFG", {"multiplier": 0.6}),
        ("TestWrapper", {"scale": 0.5}),
        ("ModelSamplingDiscrete", {"sampling": "lcm", "zsnr": False}),
    ],
)
def test_functions_and_objects_of_nodes_go_along(comfy, node, inputs):
    graph = AnyGraph(comfy, "unet")
    found = both(
        comfy,
        graph,
        graph.request(),
        {"steps": 3, "cfg": 3.0, "sampler_name": "euler"},
        lambda model: [graph.add(node, model=model, **inputs), 0],
    )
    assert_same(found)


def test_without_any_prompt_comes_what_stock_gives(comfy):
    graph = AnyGraph(comfy, "wan_t2v")
    _, negative, latent = graph.request()
    found = both(
        comfy, graph, ([graph.add("TestAnything", value="[]"), 0], negative, latent), {"steps": 2, "cfg": 3.0}
    )
    assert_same(found)


@pytest.mark.parametrize("kind", ["wan_t2v", "wan_ti2v", "flux2"])
def test_blocks_of_a_model_lie_on_two_devices_and_patches_flow_through_them(comfy, kind):
    """A single patch never meets keys of an older step, so it is exact, even if a first frame is kept (wan_ti2v)."""
    graph, sampling = AnyGraph(comfy, kind), {"steps": 4, "cfg": 3.0, "sampler_name": "euler"}
    stock, request = graph.stock(), graph.request()
    ours = {n: graph.parallel(stock, pipefusion=2, num_pipeline_patch=n) for n in (1, 3)}
    samplers = {f"{n}": graph.parallel_sampler([node, 1], *request, **sampling) for n, node in ours.items()}
    ways = samplers | {
        "stock": graph.ksampler(stock, *request, **sampling),
        "KSampler": graph.ksampler([ours[3], 0], *request, **sampling),
    }
    reports = {f"report {name}": [node[0], 1] for name, node in samplers.items()}
    found = latents(comfy, graph, ways, reports)
    assert relative_difference(found["1"], found["stock"]) <= TOLERANCE
    assert relative_difference(found["KSampler"], found["3"]) <= TOLERANCE
    assert TOLERANCE < relative_difference(found["3"], found["stock"]) < 0.2, found["report 3"]
    assert "result: exact" in found["report 1"]
    assert "result: approximate (PipeFusion: exact for the first 1 step" in found["report 3"]


@pytest.mark.parametrize("model", ["wan_t2v", "unet"])
def test_a_step_cache_leaves_blocks_out_or_is_said_to_do_nothing(comfy, model):
    sampling = {"steps": 6, "cfg": 3.0, "sampler_name": "heun", "step_cache": "first_block"}
    found = {}
    for name, threshold in {"exact": 0.0, "cached": 0.25}.items():
        graph = AnyGraph(comfy, model)
        ours = graph.parallel(graph.stock(), cfg=2)
        sampler = graph.parallel_sampler([ours, 1], *graph.request(), cache_threshold=threshold, **sampling)
        found[name] = comfy.sample_with_text(graph.prompt, sampler, [sampler[0], 1])
    (exact, _), (latent, report) = found["exact"], found["cached"]
    if model == "unet":
        assert torch.equal(latent, exact)
        assert "step_cache did nothing, so the result is exact: which parts of UNetModel are its" in report
        assert "result: exact" in report
    else:
        counted = re.search(r"step cache: (\d+) of 11 model calls reused .* \(threshold 0\.25\)", report)
        assert counted and 0 < int(counted[1]) < 11, report
        assert "result: approximate (step cache" in report and "did nothing" not in report
        assert 0 < relative_difference(latent, exact) < 0.5


def _job(comfy, sampler: str, **sampling) -> tuple[AnyGraph, list]:
    graph = AnyGraph(comfy, "flux")
    ours = graph.parallel(graph.stock(), ulysses=2)
    return graph, graph.parallel_sampler([ours, 1], *graph.request(), sampler_name=sampler, **sampling)


# euler calls the model once a step; dpmpp_sde calls it twice and draws its noise from a Brownian tree.
@pytest.mark.parametrize("sampler", ["euler", "dpmpp_sde"])
def test_progress_and_previews_come_every_step(comfy, sampler):
    graph, result = _job(comfy, sampler, steps=8, seed=21)
    with comfy.client.listen() as events:
        comfy.sample(graph.prompt, result)
    values = [value for node, value, _ in events.progress if node == result[0]]
    assert values[-1] == 8 and sorted(set(values)) == list(range(min(values), 9))
    assert len(set(values)) >= 7  # a first 0 may be reported too
    assert events.previews >= 8


def test_an_interrupt_reaches_the_ranks_and_leaves_them_warm(comfy):
    graph, result = _job(comfy, "dpmpp_sde", steps=3)
    comfy.sample(graph.prompt, result)
    ranks = comfy.ranks()
    graph, result = _job(comfy, "dpmpp_sde", steps=2000, seed=8)
    with comfy.amid(result[0], comfy.client.interrupt) as events, pytest.raises(PromptInterrupted):
        comfy.sample(graph.prompt, result)
    assert max(events.of_node(result[0])) < 1000
    assert comfy.ranks() == ranks


def test_a_prompt_goes_on_after_a_rank_was_killed_and_the_report_says_so(comfy):
    graph, result = _job(comfy, "dpmpp_3m_sde", steps=3)
    comfy.sample(graph.prompt, result)
    graph, result = _job(comfy, "dpmpp_3m_sde", steps=60, seed=9)
    with comfy.amid(result[0], lambda: comfy.ranks()[1].kill()):
        latent, report = comfy.sample_with_text(graph.prompt, result, [result[0], 1])
    assert "failed (killed by SIGKILL" in report and "goes on after step" in report
    graph, result = _job(comfy, "dpmpp_3m_sde", steps=60, seed=9)
    comfy.forget()  # otherwise ComfyUI returns its cached output
    assert torch.equal(comfy.sample(graph.prompt, result), latent)
