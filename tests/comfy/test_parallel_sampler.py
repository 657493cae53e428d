"""Parallel Sampler in the real ComfyUI gives the stock latent for models of any family. A job goes on after a rank was
killed and gives the latent of the unkilled job; if patches flow, it differs by at most a fifth of that job's difference
from stock."""

from __future__ import annotations

import pytest
import torch

from any_graphs import AnyGraph
from any_runs import TOLERANCE, both, compared, latents
from differences import relative_difference

WAYS = ("KSampler", "Parallel Sampler")


def test_inpainting_image_to_image_and_batches(comfy):
    def request(graph: AnyGraph) -> tuple[list, list, list]:
        latent = graph.latent(width=9, height=11, batch=2, draw=5, noise_mask=True)
        return graph.prompt_of(1), graph.prompt_of(2), latent

    sampling = {"steps": 5, "denoise": 0.6, "sampler_name": "euler_ancestral"}
    both(comfy, "sd3", {"cfg": 2}, request=request, by=WAYS, **sampling)


def test_without_any_prompt_comes_what_stock_gives(comfy):
    def request(graph: AnyGraph) -> tuple[list, list, list]:
        return ([graph.add("TestAnything", value="[]"), 0], *graph.request()[1:])

    both(comfy, "wan_t2v", {"cfg": 2}, request=request, by=WAYS)


def test_blocks_of_a_model_lie_on_two_devices_and_patches_flow_through_them(comfy):
    """A single patch never meets keys of an older step, so it is exact, even if a first frame is kept as here."""
    graph, sampling = AnyGraph(comfy, "wan_ti2v"), {"steps": 4, "cfg": 3.0, "sampler_name": "euler"}
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


def test_a_step_cache_is_said_to_do_nothing_where_nobody_described_the_blocks(comfy):
    sampling = {"steps": 2, "cfg": 3.0, "sampler_name": "heun", "step_cache": "first_block"}
    graph = AnyGraph(comfy, "unet")
    ours, request = graph.parallel(graph.stock(), cfg=2), graph.request()
    samplers = {
        threshold: graph.parallel_sampler([ours, 1], *request, cache_threshold=threshold, **sampling)
        for threshold in (0.0, 0.25)
    }
    found = latents(comfy, graph, samplers)
    assert torch.equal(found[0.25], found[0.0])
    assert (
        "step_cache did nothing, so the result is exact: which parts of UNetModel are its" in found["report"]
    )
    assert "result: exact" in found["report"]


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


def test_a_prompt_goes_on_after_a_rank_was_killed_and_the_report_says_so(comfy):
    graph, result = _job(comfy, "dpmpp_3m_sde", steps=3)
    comfy.sample(graph.prompt, result)
    graph, result = _job(comfy, "dpmpp_3m_sde", steps=30, seed=9)
    with comfy.amid(result[0], lambda: comfy.ranks()[1].kill()):
        found = latents(comfy, graph, {"ours": result})
    assert "failed (killed by SIGKILL" in found["report"] and "goes on after step" in found["report"]
    graph, result = _job(comfy, "dpmpp_3m_sde", steps=30, seed=9)
    comfy.forget()  # otherwise ComfyUI returns its cached output
    assert torch.equal(comfy.sample(graph.prompt, result), found["ours"])


ROUNDED = "result: approximate (exchange_dtype fp8 rounds what devices send each other; same is exact)"


SENT = (ROUNDED, "note: what devices sent each other for attention was")
NOT_SENT = ("result: exact", "note: exchange_dtype fp8 had nothing to do: no")


@pytest.mark.parametrize(
    ("kind", "choice", "least", "most", "words"),
    [("wan_t2v", {"ulysses": 2}, 1e-5, 0.1, SENT), ("flux", {"devices": "cpu:1"}, -1, 1e-5, NOT_SENT)],
    ids=["tokens are shared out", "nothing is sent"],
)
def test_rounded_exchange_is_near_stock_and_the_report_says_so(comfy, kind, choice, least, most, words):
    graph = AnyGraph(comfy, kind)
    stock, request, sampling = graph.stock(), graph.request(), {"steps": 3, "cfg": 1.0}
    ours = graph.parallel(stock, exchange_dtype="fp8", **choice)
    ways = graph.sampled_by({"stock": stock, "Parallel Sampler": [ours, 1]}, request, **sampling)
    found = latents(comfy, graph, ways)
    assert least < relative_difference(found["Parallel Sampler"], found["stock"]) < most
    assert all(one in found["report"] for one in words), found["report"]


@pytest.mark.parametrize("sampler", ["KSampler", "ParallelSampler"])
def test_samplers_that_a_node_adds_while_the_prompt_runs_are_shown_on_that_node(comfy, sampler):
    """Packs with loops add nodes in this way."""
    graph = AnyGraph(comfy, "flux")
    stock, (prompt, _, latent) = graph.stock(), graph.request()
    ours = [graph.parallel(stock, ulysses=2), int(sampler == "ParallelSampler")]
    twice = {
        name: graph.add("TestTwice", sampler=kind, model=model, prompt=prompt, latent=latent)
        for name, kind, model in (("stock", "KSampler", stock), ("ours", sampler, ours))
    }
    with comfy.client.listen() as events:
        compared(comfy, graph, {name: [node, 0] for name, node in twice.items()})
    kinds = {"parallel_sampling.progress", *({"parallel_sampling.run"} if sampler == "KSampler" else ())}
    told = {(one["type"], one["data"]["node"]) for one in events.messages if one["type"] in kinds}
    assert told == {(kind, twice["ours"]) for kind in kinds}


@pytest.mark.parametrize(
    ("kind", "killed", "warmup_steps"),
    [("wan_t2v", 0, 1), ("sd3", 1, 12)],
)
def test_a_killed_job_gives_what_the_unkilled_one_gives(comfy, kind, killed, warmup_steps):
    settings = {"steps": 12, "cfg": 3.0, "sampler_name": "euler"}
    comfy.stop_ranks()
    graph = AnyGraph(comfy, kind)
    stock, request = graph.stock(), graph.request()
    choice = {"pipefusion": 2, "warmup_steps": warmup_steps, "num_pipeline_patch": 3}
    result = graph.ksampler([graph.parallel(stock, **choice), 0], *request, **settings)
    calm = latents(comfy, graph, {"stock": graph.ksampler(stock, *request, **settings), "ours": result})
    comfy.forget()  # otherwise ComfyUI answers from its cache
    before = comfy.ranks()
    with comfy.amid(result[0], lambda: comfy.ranks()[killed].kill()):
        found = comfy.sample(graph.prompt, result)
    assert comfy.ranks() and not set(before) & set(comfy.ranks())
    difference = relative_difference(found, calm["ours"])
    drift = relative_difference(calm["ours"], calm["stock"])
    if warmup_steps == settings["steps"]:
        assert difference == 0.0, "the steps that were made again have the same bits"
    else:  # the killed job computes one more step of whole images
        assert difference <= drift / 5
