"""A process is killed while PipeFusion samples other families than Flux. The job goes on and gives the latent of the
unkilled job; if patches flow, it differs by at most a fifth of that job's difference from stock."""

from __future__ import annotations

import pytest

from any_graphs import AnyGraph
from any_runs import latents
from differences import relative_difference

STEPS = 20


def _pipeline(graph: AnyGraph, stock: list, warmup_steps: int) -> list:
    choice = {"pipefusion": 2, "warmup_steps": warmup_steps, "num_pipeline_patch": 3}
    return [graph.parallel(stock, **choice), 0]


@pytest.mark.parametrize(
    ("kind", "killed", "warmup_steps"),
    [("wan_t2v", 0, 1), ("sd3", 1, 1), ("sd3", 1, STEPS)],
)
def test_a_killed_job_gives_what_the_unkilled_one_gives(comfy, kind, killed, warmup_steps):
    settings = {"steps": STEPS, "cfg": 3.0, "sampler_name": "euler"}
    comfy.stop_ranks()
    graph = AnyGraph(comfy, kind)
    stock, request = graph.stock(), graph.request()
    calm = latents(
        comfy,
        graph,
        {
            "stock": graph.ksampler(stock, *request, **settings),
            "ours": graph.ksampler(_pipeline(graph, stock, warmup_steps), *request, **settings),
        },
    )
    comfy.forget()  # otherwise ComfyUI answers from its cache
    before = comfy.ranks()

    graph = AnyGraph(comfy, kind)
    result = graph.ksampler(_pipeline(graph, graph.stock(), warmup_steps), *graph.request(), **settings)
    with comfy.amid(result[0], lambda: comfy.ranks()[killed].kill()):
        found = latents(comfy, graph, {"ours": result})
    assert comfy.ranks() and not set(before) & set(comfy.ranks())
    difference = relative_difference(found["ours"], calm["ours"])
    drift = relative_difference(calm["ours"], calm["stock"])
    if warmup_steps == STEPS:
        assert difference == 0.0, "the steps that were made again have the same bits"
    else:  # the killed job computes one more step of whole images
        assert difference <= drift / 5
