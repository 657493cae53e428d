"""The nodes in the real ComfyUI: their public interface and texts, refused files and paths, and interrupts."""

from __future__ import annotations

import json
import urllib.request

import pytest
import torch
from safetensors.torch import load_file, save_file

from any_runs import latents, refusal
from comfy_harness import ROOT
from comfyui_client import PromptInterrupted, PromptRejected
from graphs import OURS, Graph
from write_english_locale import ENGLISH, english, own_nodes

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
    assert info["description"]
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


def test_a_strategy_given_to_the_sampler_replaces_the_loaders(comfy, unet):
    graph = Graph()
    loader, strategy = graph.parallel_loader(unet, "cpu:1"), graph.strategy("cpu:2", ring=2)
    sampled = graph.parallel_sampler(loader, *graph.request(), strategy=strategy)
    report = latents(comfy, graph, {"ours": sampled})["report"]
    assert "Ring 2" in report and "cpu:0, cpu:1" in report


@pytest.mark.parametrize("node", ["KSampler", "ParallelSampler"])
def test_weights_that_are_no_numbers_are_told_of_and_no_black_image_comes_out(comfy, unet, node):
    tensors = load_file(comfy.models() / unet)
    tensors["final_layer.linear.weight"][0, 0] = torch.nan
    save_file(tensors, comfy.models() / "tiny_nan.safetensors")
    graph = Graph()
    model, request = graph.model(OURS, "tiny_nan.safetensors"), graph.request()
    sampled = (
        graph.ksampler(model, *request) if node == "KSampler" else graph.parallel_sampler(model[0], *request)
    )
    failure = refusal(comfy, graph, sampled, r"NaN or infinite in step 1 of \d; the image would be black")
    assert failure.node_type == node
    assert failure.exception_type.endswith("RequestError")


@pytest.mark.parametrize("name", ["../outside.safetensors", "ABSOLUTE"])
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
    latent = graph.parallel_sampler(loader, *graph.request())
    with pytest.raises(PromptRejected, match="not in list"):
        comfy.sample(graph.prompt, latent)


@pytest.mark.parametrize("way", ["Parallel Sampler", "KSampler"])
def test_an_interrupt_reaches_the_ranks_and_leaves_them_warm(comfy, unet, way):
    def graph(steps: int) -> tuple[Graph, list]:
        made = Graph()
        loader = made.parallel_loader(unet, "cpu:2")
        if way == "Parallel Sampler":
            return made, made.parallel_sampler(loader, *made.request(), steps=steps)
        return made, made.ksampler([loader, 1], *made.request(), steps=steps)

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
    assert torch.equal(comfy.sample(short.prompt, short_latent), before)


def test_the_english_locale_is_what_the_schemas_say(comfy):
    said = english(comfy.registry)
    assert json.loads(ENGLISH.read_text("utf-8")) == said, "run: python scripts/write_english_locale.py"


def test_every_node_can_be_found_by_other_words_and_those_to_begin_with_by_raylights_name(comfy):
    words = {name: info["search_aliases"] for name, info in own_nodes(comfy.registry).items()}
    assert all(words.values()), words
    found = {name for name, aliases in words.items() if "raylight" in aliases}
    assert {"ParallelModel", "ParallelSampler", "StrategySelector"} <= found


def test_the_docs_compare_the_pack_with_comfyuis_own_node_by_its_name(comfy):
    stock = comfy.registry["MultiGPU_WorkUnits"]["display_name"]
    assert f"| | {stock} | this pack |" in (ROOT / "docs" / "selector.md").read_text("utf-8")


@pytest.mark.parametrize("language", ["en", "es", "zh"])
def test_comfyui_serves_the_locale(comfy, language):
    served = comfy.ask("/i18n", method="GET")[1][language]
    folder = ROOT / "locales" / language
    for name, texts in json.loads((folder / "nodeDefs.json").read_text("utf-8")).items():
        assert served["nodeDefs"][name] == texts
    categories = json.loads((folder / "main.json").read_text("utf-8"))["nodeCategories"]
    assert served["nodeCategories"] == categories
    assert set(categories) == {node["category"] for node in own_nodes(comfy.registry).values()}


@pytest.mark.parametrize("file", ["{}.md", "{}/es.md", "{}/zh.md"])
def test_comfyui_serves_each_help_page_where_its_page_looks(measuring, file):
    """The page requests /extensions/<pack>/docs/<node>/<language>.md, then /extensions/<pack>/docs/<node>.md."""
    for name, info in own_nodes(measuring.registry).items():
        pack = info["python_module"].split(".")[1]
        url = f"{measuring.server.url}/extensions/{pack}/docs/{file.format(name)}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            assert "text/html" not in answer.headers["content-type"]  # the page treats HTML as an error
            assert answer.read() == (ROOT / "web" / "docs" / file.format(name)).read_bytes()
