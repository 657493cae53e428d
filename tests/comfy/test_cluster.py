"""A cluster's machines as a graph's devices give the latent of stock KSampler: a torchrun that starts as outside tests,
and a forked one."""

import pytest
from safetensors.torch import load_file

from any_runs import compared, refusal
from cluster_machines import ForkedTorchrun, Torchrun
from comfy_harness import require_comfyui
from comfyui_client import PromptRejected
from comfyui_server import free_port
from differences import relative_difference
from graphs import STOCK, Graph
from waiting import wait_until

DEVICES = "cluster:lab"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_graph_runs_on_two_machines_by_either_provider(second, tmp_path):
    meeting, machines = f"127.0.0.1:{free_port()}", []
    comfy = second.running()
    unet = comfy.write_flux("tiny.safetensors")

    def assert_stocks(loader: str) -> None:
        graph = Graph()
        stock, strategy = graph.model(STOCK, unet), graph.strategy(DEVICES)
        if loader == "ParallelModel":
            ours = [graph.add(loader, model=stock, strategy=strategy), 1]
        else:
            ours = graph.loaded_by(loader, unet, strategy)
        models = {"stock": stock, "Parallel Sampler": ours if isinstance(ours, list) else [ours, 0]}
        ways = graph.sampled_by(models, graph.request(), cfg=3.0)
        report = compared(comfy, graph, ways, 1e-5)["report"]
        assert "CFG 2" in report and "cpu:0@lab/a, cpu:0@lab/b" in report

    with pytest.raises(PromptRejected, match="no machine has joined it yet"):
        assert_stocks("ParallelFluxLoader")
    try:
        for name, torchrun in {"a": Torchrun, "b": ForkedTorchrun}.items():
            machines.append(
                torchrun(
                    name,
                    second.secret,
                    f"127.0.0.1:{second.port}",
                    meeting,
                    models=comfy.server.base_directory / "models",
                    comfyui=require_comfyui(),
                    log=tmp_path / f"{name}.log",
                )
            )
        joined = [tmp_path / f"{name}.log" for name in ("a", "b")]
        wait_until(lambda: all("joined the cluster lab" in log.read_text() for log in joined), 240.0)
        assert_stocks("ParallelModel")
        graph = Graph()
        clip = [graph.add("TestEncoder", kind="clip_l", clip_name="tiny-far.safetensors", draw=3), 0]
        strategy = graph.strategy(DEVICES)
        ours = [graph.add("ParallelCLIP", clip=clip, placement="all devices", strategy=strategy), 0]
        for name, one in {"stock": clip, "ours": ours}.items():
            text = [graph.add("CLIPTextEncode", clip=one, text="a red cat"), 0]
            graph.save(text, f"far-{name}.safetensors")
        comfy.run(graph.prompt)
        stock, far = (load_file(comfy.output(f"far-{name}.safetensors")) for name in ("stock", "ours"))
        assert all(relative_difference(far[name], one) <= 1e-5 for name, one in stock.items())
        # A graph that needs a function of a pack which only this computer's ComfyUI has.
        graph = Graph()
        ours = [graph.parallel_loader(unet, DEVICES), 1]
        wrapped = [graph.add("TestWrapper", model=ours, scale=0.5), 0]
        latent = graph.ksampler(wrapped, *graph.request(), cfg=3.0)
        refusal(comfy, graph, latent, "Machine [ab] does not have the pack parallel_test_nodes, whose code")
        assert_stocks("ParallelFluxLoader")
    finally:
        for machine in machines:
            machine.stop()
