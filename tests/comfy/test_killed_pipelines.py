"""A process is killed while PipeFusion samples other families than Flux. The job goes on and gives the latent of the
unkilled job; if patches flow, it differs by at most a fifth of that job's difference from stock."""

from __future__ import annotations

import pytest

from any_graphs import AnyGraph
from any_runs import latents
from differences import relative_difference

STEPS = 20


@pytest.mark.parametrize(
    ("kind", "killed", "warmup_steps"),
    [("wan_t2v", 0, 1), ("sd3", 1, STEPS)],
)
def test_a_killed_job_gives_what_the_unkilled_one_gives(comfy, kind, killed, warmup_steps):
    settings = {"steps": STEPS, "cfg": 3.0, "sampler_name": "euler"}
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
    if warmup_steps == STEPS:
        assert difference == 0.0, "the steps that were made again have the same bits"
    else:  # the killed job computes one more step of whole images
        assert difference <= drift / 5
