"""A cluster's machines as a graph's devices give the latent of stock KSampler: a torchrun that starts as outside tests,
and a forked one."""

import pytest
from safetensors.torch import load_file

from cluster_machines import ForkedTorchrun, Torchrun
from comfy_harness import require_comfyui
from comfyui_client import PromptFailed, PromptRejected
from comfyui_server import free_port
from differences import relative_difference
from graphs import STOCK, Graph
from waiting import wait_until

DEVICES = "cluster:lab"


def _stock(unet):
    graph = Graph()
    texts = graph.text(1), graph.text(2)
    latent = graph.ksampler(graph.model(STOCK, unet), *texts, graph.latent(), cfg=3.0)
    return graph.prompt, latent


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_graph_runs_on_two_machines_by_either_provider(second, tmp_path):
    meeting, machines = f"127.0.0.1:{free_port()}", []
    comfy = second.running()
    unet = comfy.write_flux("tiny.safetensors")
    expected = comfy.sample(*_stock(unet))

    def sample(build):
        graph = Graph()
        texts = graph.text(1), graph.text(2)
        return comfy.sample_with_text(*build(graph, texts))

    def flux(graph, texts):
        loader = graph.parallel_loader(unet, DEVICES)
        latent = graph.parallel_sampler(loader, *texts, graph.latent(), cfg=3.0)
        return graph.prompt, latent, [latent[0], 1]

    def any_model(graph, texts):
        strategy = graph.strategy(DEVICES)
        model = graph.add("ParallelModel", model=graph.model(STOCK, unet), strategy=strategy)
        latent = graph.parallel_sampler([model, 1], *texts, graph.latent(), cfg=3.0)
        return graph.prompt, latent, [latent[0], 1]

    def wrapped(graph, texts):
        """Returns a graph that needs a function of a pack which only this computer's ComfyUI has."""
        loader = graph.parallel_loader(unet, DEVICES)
        model = [graph.add("TestWrapper", model=[loader, 1], scale=0.5), 0]
        latent = graph.ksampler(model, *texts, graph.latent(), cfg=3.0)
        return graph.prompt, latent, [graph.add("TestRankStates", nonce=1), 0]

    with pytest.raises(PromptRejected, match="no machine has joined it yet"):
        sample(flux)
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
        for build in (flux, any_model):
            found, report = sample(build)
            assert relative_difference(found, expected) <= 1e-5
            assert "CFG 2" in report and "cpu:0@lab/a, cpu:0@lab/b" in report
        graph = Graph()
        clip = [graph.add("TestEncoder", kind="clip_l", clip_name="tiny-far.safetensors", draw=3), 0]
        strategy = graph.strategy(DEVICES)
        ours = [graph.add("ParallelCLIP", clip=clip, placement="all devices", strategy=strategy), 0]
        for name, one in {"stock": clip, "ours": ours}.items():
            text = [graph.add("CLIPTextEncode", clip=one, text="a red cat"), 0]
            graph.add("TestSaveTensors", value=text, path=f"far-{name}.safetensors")
        comfy.run(graph.prompt)
        stock, far = (load_file(comfy.output(f"far-{name}.safetensors")) for name in ("stock", "ours"))
        assert all(relative_difference(far[name], one) <= 1e-5 for name, one in stock.items())
        with pytest.raises(
            PromptFailed, match=r"Machine [ab] does not have the pack parallel_test_nodes, whose code"
        ):
            sample(wrapped)
        assert relative_difference(sample(flux)[0], expected) <= 1e-5
    finally:
        for machine in machines:
            machine.stop()
