"""Refusals of Parallel Model: each has clear words, and the ranks stay warm."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from any_graphs import MODELS, AnyGraph
from any_runs import compared, refusal
from comfyui_client import PromptRejected
from graphs import Graph


def fails(comfy, graph: Graph, latent: list) -> str:
    message = refusal(comfy, graph, latent).exception_message
    assert "lux" not in message, "words of another model"
    return message


@pytest.mark.parametrize(
    ("kind", "choice", "words"),
    [
        ("wan_t2v", {"ulysses": 3}, "more than the 2 attention heads"),
        (
            "wan_vace",
            {"pipefusion": 2},
            "any_wan_vace.safetensors cannot be laid out over devices yet; the nearest",
        ),
        ("ltx_video", {"tensor": 2}, "the nearest valid setting is tensor_degree 1"),
    ],
)
def test_a_strategy_that_the_model_does_not_have_is_refused(comfy, kind, choice, words):
    graph = AnyGraph(comfy, kind)
    ours = [graph.parallel(graph.stock(), **choice), 0]
    with pytest.raises(PromptRejected, match=words):  # before anything is queued
        comfy.sample(graph.prompt, graph.ksampler(ours, *graph.request(), steps=1))


@pytest.mark.parametrize(
    ("notes", "words"), [(True, "unknown_loader"), (False, "does not say which file it was loaded from")]
)
def test_a_model_of_another_packs_loader_is_refused_with_those_that_work(comfy, notes, words):
    graph = AnyGraph(comfy, "flux")
    model = [graph.add("TestUnknownLoader", model=graph.stock(), notes=notes), 0]
    ours = [graph.parallel(model, ulysses=2), 0]
    message = fails(comfy, graph, graph.ksampler(ours, *graph.request(), steps=1))
    assert words in message and "Load Diffusion Model or Load Checkpoint" in message


# Widths of prompts and channels of latents that belong to other models. Any text length fits any model.
WRONG = [
    ("wan_t2v", {"width": 48}, None, "a prompt of width 48 came, and any_wan_t2v.safetensors takes"),
    ("hunyuan_video", {"width": 4096}, None, "prompts of width 48"),
    ("cogvideo", {"width": 4096}, None, "prompts of width 48"),
    ("unet", {"width": 2048}, None, "prompts of width 768"),
    ("sd3", {}, "1,4,11,9", "latent_image: a latent of 4 channels came, and any_sd3.safetensors takes 16"),
    ("sd3", {"pooled_width": 8}, None, "cannot compute with what it was given"),
    ("unet", {}, "1,16,8,6", "UNetModel cannot compute with what it was given"),  # the module's own words
]


@pytest.mark.parametrize(("kind", "text", "latent", "words"), WRONG)
def test_what_is_made_for_another_model_is_refused_and_leaves_the_ranks_warm(
    comfy, kind, text, latent, words
):
    graph = AnyGraph(comfy, kind)
    stock = graph.stock()
    ours = graph.parallel(stock, **({"cfg": 2} if kind == "unet" else {"ulysses": 2}))
    right = graph.request()
    comfy.sample(graph.prompt, graph.ksampler([ours, 0], *right, steps=1, cfg=3.0))
    ranks = {rank.pid for rank in comfy.ranks()}

    prompt = graph.text(1, **MODELS[kind]["text"] | text)
    wrong = [graph.add("TestShapedLatent", shape=latent, draw=5), 0] if latent else right[2]
    request = prompt, prompt, wrong
    for sampled in (
        graph.ksampler([ours, 0], *request, cfg=3.0),
        graph.parallel_sampler([ours, 1], *request, cfg=3.0),
    ):
        assert words in fails(comfy, graph, sampled)
    refusal(comfy, graph, graph.ksampler(stock, *request, cfg=3.0))
    assert {rank.pid for rank in comfy.ranks()} == ranks


def test_a_parallel_model_is_not_made_parallel_twice(comfy):
    graph = AnyGraph(comfy, "flux")
    twice = [graph.parallel([graph.parallel(graph.stock(), ulysses=2), 0], ulysses=2), 0]
    assert "parallel already" in fails(comfy, graph, graph.ksampler(twice, *graph.request(), steps=1))


@pytest.mark.parametrize(
    ("half", "words"), [(0, "it is truncated (0 bytes)"), (0.5, "bytes of tensors are announced")]
)
def test_a_damaged_file_is_named_with_what_is_wrong_and_the_remedy(comfy, half, words):
    path = comfy.server.base_directory / "models" / "diffusion_models" / "damaged.safetensors"
    whole = path.with_name(comfy.write_flux("any_flux.safetensors")).read_bytes()
    path.write_bytes(whole[: int(half * len(whole))])
    graph = AnyGraph(comfy, "flux")
    loader = [graph.add("ParallelModelLoader", model_name=path.name, weight_dtype="default"), 0]
    message = fails(comfy, graph, graph.ksampler(loader, *graph.request(), steps=1))
    path.unlink()
    assert (
        message.startswith(f"{path.name} is refused: ") and words in message and "choose another" in message
    )


def test_a_control_lora_is_refused_where_the_models_weights_are_shared_out(comfy):
    folder = comfy.server.base_directory / "models" / "controlnet"
    folder.mkdir(exist_ok=True)
    tensors = {"lora_controlnet": torch.ones(1), "input_hint_block.0.weight": torch.ones(16, 3, 3, 3)}
    save_file(tensors, folder / "control_lora.safetensors")
    graph = AnyGraph(comfy, "unet")
    positive, negative, latent = graph.request()
    prompts = graph.controlled(positive, negative, "control_lora.safetensors", width=48, height=64)
    ours = [graph.parallel(graph.stock(), cfg=2, shard_weights=True), 0]
    message = fails(comfy, graph, graph.ksampler(ours, *prompts, latent, steps=1))
    assert "such as a Control-LoRA" in message and "take a whole ControlNet" in message


@pytest.mark.parametrize("loader", ["ParallelFluxLoader", "ParallelModelLoader", "ParallelLoraLoader"])
def test_a_link_to_a_file_that_is_gone_is_told_with_the_remedy(comfy, loader):
    is_lora = loader == "ParallelLoraLoader"
    folder = comfy.server.base_directory / "models" / ("loras" if is_lora else "diffusion_models")
    folder.mkdir(exist_ok=True)
    link = folder / "gone.safetensors"
    link.symlink_to(folder / "never there.safetensors")
    graph = AnyGraph(comfy, "flux")
    if is_lora:
        parallel = graph.parallel(graph.stock(), ulysses=2)
        model = graph.add(loader, parallel_model=[parallel, 1], lora_name=link.name, strength=1.0)
    else:
        model = graph.loaded_by(loader, link.name)
    latent = graph.parallel_sampler(model, *graph.request(), steps=1)
    message = fails(comfy, graph, latent)
    link.unlink()
    assert message.startswith("There is no file behind gone.safetensors: ") and "choose another" in message


def test_loaders_offer_files_by_any_ending_that_comfyui_lists(comfy):
    folder = comfy.server.base_directory / "models" / "diffusion_models"
    names = ["upper.SAFETENSORS", "short.sft"]
    for name in names:
        (folder / name).symlink_to(folder / comfy.write_flux("any_flux.safetensors"))
    offered = comfy.client.object_info()
    for loader, field in (("ParallelFluxLoader", "unet_name"), ("ParallelModelLoader", "model_name")):
        assert set(names) <= set(offered[loader]["input"]["required"][field][1]["options"])
    graph = AnyGraph(comfy, "flux")
    strategy, request = graph.strategy("cpu:2", ulysses=2), graph.request()
    ways = {
        way: graph.parallel_sampler(graph.loaded_by(loader, name, strategy), *request, steps=1)
        for way, loader, name in zip(
            ("stock", "ours"), ("ParallelFluxLoader", "ParallelModelLoader"), names, strict=True
        )
    }
    compared(comfy, graph, ways)
    for name in names:
        (folder / name).unlink()
