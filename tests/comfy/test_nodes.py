"""The nodes in the real ComfyUI: their public interface, refused files and paths, and interrupts."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from comfyui_client import PromptFailed, PromptInterrupted, PromptRejected
from graphs import Graph

# Inputs, in their order, and outputs of each node.
OUR_NODES = {
    "ParallelFluxLoader": "unet_name weight_dtype strategy compile attention exchange_dtype -> PARALLEL_MODEL MODEL",
    "StrategySelector": "mode devices cfg_degree pipefusion_degree ring_degree ulysses_degree data_degree engine "
    "tensor_degree shard_weights offload_weights num_pipeline_patch warmup_steps device_shares approximation "
    "-> PARALLEL_STRATEGY STRING",
    "ParallelLoraLoader": "parallel_model lora_name strength -> PARALLEL_MODEL",
    "ParallelSampler": "parallel_model positive negative latent_image seed steps cfg sampler_name scheduler denoise "
    "strategy step_cache cache_threshold -> LATENT STRING",
    "ParallelModel": "model strategy compile exchange_dtype -> MODEL PARALLEL_MODEL",
    "ParallelModelLoader": "model_name weight_dtype strategy compile exchange_dtype -> MODEL PARALLEL_MODEL",
    "ParallelStepCache": "model cache_threshold -> MODEL",
    "ParallelDemoLoader": "strategy -> PARALLEL_MODEL MODEL CLIP VAE",
    "ParallelVAEDecode": "samples vae strategy -> IMAGE STRING",
    "ParallelVAEEncode": "pixels vae strategy -> LATENT STRING",
}


@pytest.mark.parametrize("name", OUR_NODES)
def test_ids_inputs_and_outputs_are_as_published(comfy, name):
    info = comfy.registry[name]
    inputs = {**info["input"].get("required", {}), **info["input"].get("optional", {})}
    assert " ".join([*inputs, "->", *info["output"]]) == OUR_NODES[name]
    assert info["category"] == "parallel"
    assert info["description"] and info["search_aliases"]
    assert info["python_module"] == "custom_nodes.My Pack v1.0"
    for entry in inputs.values():
        assert len(entry) > 1 and entry[1].get("tooltip"), entry
    assert all(info["output_tooltips"])


def test_sampler_and_scheduler_lists_are_comfyuis_own(comfy):
    info = comfy.registry
    for name in ("sampler_name", "scheduler"):
        ours = info["ParallelSampler"]["input"]["required"][name][1]["options"]
        stock = info["KSampler"]["input"]["required"][name]
        assert ours == (stock[1]["options"] if stock[0] == "COMBO" else stock[0])


def _fails(comfy, graph: Graph, latent: list) -> PromptFailed:
    with pytest.raises(PromptFailed) as raised:
        comfy.sample(graph.prompt, latent)
    return raised.value


def _parallel(graph: Graph, loader: str, **settings) -> list:
    return graph.parallel_sampler(loader, graph.text(1), graph.text(2), graph.latent(), **settings)


def test_a_strategy_given_to_the_sampler_replaces_the_loaders(comfy, unet):
    graph = Graph()
    loader = graph.parallel_loader(unet, "cpu:1")
    strategy = graph.strategy("cpu:2", ring=2)
    result = _parallel(graph, loader, strategy=strategy)
    _, report = comfy.sample_with_text(graph.prompt, result, [result[0], 1])
    assert "Ring 2" in report and "cpu:0, cpu:1" in report


def _bad_files(folder):
    (folder / "short.safetensors").write_bytes(b"\x01")
    save_file({"input_blocks.0.0.weight": torch.zeros(2)}, folder / "sdxl.safetensors")


@pytest.mark.parametrize(
    ("name", "words"),
    [("short", "truncated"), ("sdxl", "Stable Diffusion")],
)
def test_a_bad_file_is_refused_by_name_and_the_group_lives_on(comfy, unet, name, words):
    _bad_files(comfy.server.base_directory / "models" / "diffusion_models")
    good = Graph()
    good_latent = _parallel(good, good.parallel_loader(unet, "cpu:2"))
    comfy.sample(good.prompt, good_latent)
    ranks = comfy.ranks()
    assert len(ranks) == 2
    bad = Graph()
    failure = _fails(comfy, bad, _parallel(bad, bad.parallel_loader(f"{name}.safetensors", "cpu:2")))
    assert f"{name}.safetensors is refused" in failure.exception_message
    assert words in failure.exception_message
    comfy.sample(good.prompt, good_latent)
    assert comfy.ranks() == ranks


@pytest.mark.parametrize(
    "name",
    [
        "../outside.safetensors",
        "ABSOLUTE",
        r"\\host\share\x.safetensors",
        "x\0.safetensors",
        "sub/../../outside.safetensors",
    ],
)
@pytest.mark.parametrize("node", ["ParallelFluxLoader", "ParallelLoraLoader"])
def test_a_path_out_of_the_model_folders_is_no_choice(comfy, unet, node, name):
    """The file outside.safetensors exists, but ComfyUI does not list it."""
    outside = comfy.server.base_directory / "models" / "outside.safetensors"
    save_file({"x": torch.zeros(1)}, outside)
    name = str(outside) if name == "ABSOLUTE" else name
    graph = Graph()
    if node == "ParallelFluxLoader":
        loader = graph.parallel_loader(name, "cpu")
    else:
        model = [graph.parallel_loader(unet, "cpu"), 0]
        loader = graph.add(node, parallel_model=model, lora_name=name, strength_model=1.0)
    latent = _parallel(graph, loader)
    with pytest.raises(PromptRejected, match="not in list"):
        comfy.sample(graph.prompt, latent)


@pytest.mark.parametrize("way", ["Parallel Sampler", "KSampler"])
def test_an_interrupt_reaches_the_ranks_and_leaves_them_warm(comfy, unet, way):
    def graph(steps):
        made = Graph()
        loader = made.parallel_loader(unet, "cpu:2")
        if way == "Parallel Sampler":
            return made, _parallel(made, loader, steps=steps)
        return made, made.ksampler([loader, 1], made.text(1), made.text(2), made.latent(), steps=steps)

    short, short_latent = graph(3)
    before = comfy.sample(short.prompt, short_latent)
    ranks = comfy.ranks()
    made, latent = graph(5000)
    with comfy.amid(latent[0], comfy.client.interrupt) as events, pytest.raises(PromptInterrupted):
        comfy.sample(made.prompt, latent)
    assert max(events.of_node(latent[0])) < 2500
    assert comfy.ranks() == ranks
    made, latent = graph(4)
    comfy.sample(made.prompt, latent)
    # The first job again, after one with another number of steps, gives the same bits.
    comfy.forget()
    again, again_latent = graph(3)
    assert torch.equal(comfy.sample(again.prompt, again_latent), before)
