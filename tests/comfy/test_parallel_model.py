"""A model behind its stock loader gives the same latent with and without Parallel Model before KSampler. Refusals have
clear words, and the ranks stay warm."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from any_graphs import MODELS, AnyGraph
from any_runs import TOLERANCE, both, compared, latents, refusal
from comfy_modules import import_comfyui_here
from comfyui_client import PromptRejected
from differences import relative_difference
from graphs import Graph
from lora_files import pair
from pack_nodes import import_node_module


@pytest.mark.parametrize(
    ("choice", "request_of"),
    [({"data": 2}, {"batch": 3}), ({"cfg": 2}, {"uneven": True}), ({"ulysses": 2}, {"uneven": True})],
)
def test_odd_batches_and_prompts_of_different_lengths_give_the_stock_latent(comfy, choice, request_of):
    both(comfy, "wan_t2v", choice, **request_of)


def test_both_prompts_go_into_one_call_however_full_comfyuis_device_is(comfy):
    """Otherwise CFG parallelism would have no work to split on exactly the cards that need it."""
    graph = AnyGraph(comfy, "wan_t2v")
    ours = graph.parallel(graph.stock(), cfg=2)
    positive, negative, latent = graph.request()
    full = [graph.add("TestNoFreeMemory", latent=latent, pretend=True), 0]
    sampled = graph.parallel_sampler([ours, 1], positive, negative, full, steps=2, cfg=3.0)
    after = [graph.add("TestNoFreeMemory", latent=sampled, pretend=False), 0]
    report = latents(comfy, graph, {"ours": after}, {"report": [sampled[0], 1]})["report"]
    assert "CFG 2" in report and "would idle" not in report


def test_a_degree_set_by_hand_that_has_no_work_becomes_ulysses(comfy):
    report = both(comfy, "wan_t2v", {"cfg": 2}, cfg=1.0, by=("KSampler", "Parallel Sampler"))["report"]
    assert "CFG 2 became Ulysses 2" in report


@pytest.mark.parametrize("kind", ["wan_fp8", "ltx_sound", "sd3", "sound"])
def test_the_loader_gives_the_stock_latent_without_a_weight_in_comfyui(comfy, kind):
    graph = AnyGraph(comfy, kind)
    choice = {"cfg": 2} if kind == "sound" else {"ulysses": 2}  # its tokens cannot be split
    strategy = graph.strategy("cpu:2", **choice)
    ours = graph.add("ParallelModelLoader", model_name=graph.file, weight_dtype="default", strategy=strategy)
    ways = graph.sampled_by({"stock": graph.stock(), "ours": [ours, 0]}, graph.request(), steps=2, cfg=3.0)
    places = graph.add("TestPlacesOfWeights", model=[ours, 0])
    graph.add("TestSaveText", text=[places, 0], path="places.txt")
    compared(comfy, graph, ways)
    assert set(json.loads(comfy.output("places.txt").read_text())) == {"meta"}


# Shapes (rows, columns) of layers of the tiny Wan model, by their names in a LoRA's file.
LORA_LAYERS = {"blocks.0.self_attn.q": (256, 256), "blocks.1.ffn.0": (256, 256), "head.head": (64, 256)}


@pytest.fixture(scope="module")
def loras(comfy) -> list[str]:
    """File names of two LoRAs: one of low rank, one with differences of whole weights."""
    folder = comfy.models("loras")
    low, whole = {}, {}
    for seed, (layer, (rows, columns)) in enumerate(LORA_LAYERS.items()):
        up, down = pair(rows, columns, 4, seed)
        low |= {
            f"diffusion_model.{layer}.lora_up.weight": up,
            f"diffusion_model.{layer}.lora_down.weight": down,
        }
        whole[f"diffusion_model.{layer}.diff"] = up @ down
    save_file(low, folder / "any_low.safetensors")
    save_file(whole, folder / "any_whole.safetensors")
    return ["any_low.safetensors", "any_whole.safetensors"]


@pytest.mark.parametrize(("choice", "kind"), [({"ulysses": 2}, "wan_t2v"), ({"cfg": 2}, "wan_fp8")])
def test_loras_before_and_after_it_count_like_stock_ones(comfy, loras, choice, kind):
    graph = AnyGraph(comfy, kind)
    plain = graph.stock()
    before = graph.lora(plain, loras[0], 0.8)
    ours = graph.parallel(before, **choice)
    lora_loader = graph.add("ParallelLoraLoader", parallel_model=[ours, 1], lora_name=loras[1], strength=-0.5)
    models = {
        "stock": graph.lora(before, loras[1], -0.5),
        "ours": graph.lora([ours, 0], loras[1], -0.5),
        "Parallel Sampler": [lora_loader, 0],
        "without": plain,
    }
    ways = graph.sampled_by(models, graph.request(), steps=2, cfg=3.0)
    # A changed fp8 weight is rounded stochastically.
    compared(comfy, graph, ways, TOLERANCE if kind == "wan_t2v" else 1e-3)


FLAGS = {  # of ComfyUI: those that its ranks get
    "--port 8190 --lowvram --preview-method auto": "",
    "--fp8_e4m3fn-unet --use-split-cross-attention": "--fp8_e4m3fn-unet --use-split-cross-attention",
    "--fast fp16_accumulation autotune --cpu": "--fast autotune fp16_accumulation",
    "--dont-upcast-attention --force-fp16 --novram": "--force-fp16 --dont-upcast-attention",
}


def test_a_model_that_was_made_parallel_while_another_ones_patches_were_in_its_weights_has_its_own(comfy):
    """ComfyUI takes patches out only when it runs the next MODEL with the same weights."""
    graph = AnyGraph(comfy, "unet")
    stock, request, settings = graph.stock(), graph.request(), {"steps": 2, "cfg": 1.0}
    patched = [graph.add("UNetSelfAttentionMultiply", model=stock, q=1.6, k=1.4, v=0.7, out=1.3), 0]
    ours = [graph.parallel(stock, ulysses=2), 0]
    comfy.sample(graph.prompt, graph.ksampler(patched, *request, **settings))
    comfy.sample(graph.prompt, graph.ksampler(ours, *request, **settings))  # makes the MODEL of `ours`
    found = comfy.sample(graph.prompt, graph.ksampler(stock, *request, **settings))
    later = comfy.sample(graph.prompt, graph.ksampler(ours, *request, **settings, seed=8))
    expected = comfy.sample(graph.prompt, graph.ksampler(stock, *request, **settings, seed=8))
    assert relative_difference(later, expected) <= TOLERANCE
    assert relative_difference(found, expected) > TOLERANCE


def test_ranks_get_the_flags_that_change_numbers_and_no_others():
    import_comfyui_here()
    from comfy.cli_args import parser

    numeric_flags = import_node_module("nodes.host.comfyui_flags").numeric_flags
    assert {line: " ".join(numeric_flags(parser.parse_args(line.split()))) for line in FLAGS} == FLAGS


@pytest.mark.parametrize(
    ("dtype", "scale"), [("default", 1.0), ("default", 1.5), ("bfloat16", 1.0), ("float8_e4m3fn", 1.0)]
)
def test_the_file_that_another_packs_loader_names_is_enough(comfy, dtype, scale):
    """A weight that the loader has changed is sent with the job."""
    graph = AnyGraph(comfy, "flux")
    stock = [graph.add("TestPackLoader", model_name=graph.file, dtype=dtype, scale=scale), 0]
    models = {"stock": stock, "ours": [graph.parallel(stock, ulysses=2), 0]}
    compared(comfy, graph, graph.sampled_by(models, graph.request(), steps=2))


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
    path = comfy.models() / "damaged.safetensors"
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
    tensors = {"lora_controlnet": torch.ones(1), "input_hint_block.0.weight": torch.ones(16, 3, 3, 3)}
    save_file(tensors, comfy.models("controlnet") / "control_lora.safetensors")
    graph = AnyGraph(comfy, "unet")
    positive, negative, latent = graph.request()
    prompts = graph.controlled(positive, negative, "control_lora.safetensors", width=48, height=64)
    ours = [graph.parallel(graph.stock(), cfg=2, shard_weights=True), 0]
    message = fails(comfy, graph, graph.ksampler(ours, *prompts, latent, steps=1))
    assert "such as a Control-LoRA" in message and "take a whole ControlNet" in message


@pytest.mark.parametrize("loader", ["ParallelFluxLoader", "ParallelModelLoader", "ParallelLoraLoader"])
def test_a_link_to_a_file_that_is_gone_is_told_with_the_remedy(comfy, loader):
    is_lora = loader == "ParallelLoraLoader"
    folder = comfy.models("loras" if is_lora else "diffusion_models")
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
    folder = comfy.models()
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
