"""A model behind its stock loader gives the same latent with and without Parallel Model before KSampler."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file, save_file

from any_graphs import ROWS_ONLY, AnyGraph
from any_runs import TOLERANCE, both, compared, latents
from differences import relative_difference
from graphs import Graph
from lora_files import pair


def test_images_that_devices_cannot_share_out_evenly_give_the_stock_latent(comfy):
    both(comfy, "wan_t2v", {"data": 2}, batch=3)


@pytest.mark.parametrize("choice", [{"cfg": 2}, {"ulysses": 2}])
def test_prompts_of_different_lengths_give_the_stock_latent(comfy, choice):
    both(comfy, "wan_t2v", choice, uneven=True)


def test_a_model_whose_blocks_nobody_described_takes_ulysses_for_its_attention(comfy):
    """With a negative prompt there are as many rows as devices, so each device computes one whole row."""
    both(comfy, "unet", {"ulysses": 2})


def test_a_change_of_the_prompt_changes_the_latent_by_far_more_than_the_tolerance(comfy):
    """The negative control: it shows that the comparisons of this file would notice a wrong prompt."""
    graph = AnyGraph(comfy, "wan_t2v")
    ours = [graph.parallel(graph.stock(), ulysses=2), 0]
    positive, negative, latent = graph.request()
    ways = {
        "one": graph.ksampler(ours, positive, negative, latent, steps=2),
        "other": graph.ksampler(ours, negative, negative, latent, steps=2),
    }
    found = latents(comfy, graph, ways)
    assert relative_difference(found["one"], found["other"]) > 100 * TOLERANCE


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


def test_ranks_stay_when_a_call_before_the_run_has_no_use_for_a_degree(comfy):
    """Layers of this model prepare the positive and the negative prompt in two separate calls before the run."""
    ranks = []
    for seed in (1, 2):
        graph = AnyGraph(comfy, "ltx_sound")
        ours = graph.parallel(graph.stock(), cfg=2)
        sampled = graph.ksampler([ours, 0], *graph.request(), steps=1, cfg=3.0, seed=seed)
        latents(comfy, graph, {"ours": sampled})
        ranks.append({rank.pid for rank in comfy.ranks()})
    assert ranks[0] == ranks[1] and len(ranks[0]) == 2


@pytest.mark.parametrize("kind", ["wan_fp8", "ltx_sound", "sd3", "sound"])
def test_the_loader_gives_the_stock_latent_without_a_weight_in_comfyui(comfy, kind):
    graph = AnyGraph(comfy, kind)
    choice = {"cfg": 2} if kind in ROWS_ONLY else {"ulysses": 2}
    strategy = graph.strategy("cpu:2", **choice)
    ours = graph.add("ParallelModelLoader", model_name=graph.file, weight_dtype="default", strategy=strategy)
    request, settings = graph.request(), {"steps": 2, "cfg": 3.0}
    ways = {
        "stock": graph.ksampler(graph.stock(), *request, **settings),
        "ours": graph.ksampler([ours, 0], *request, **settings),
    }
    places = graph.add("TestPlacesOfWeights", model=[ours, 0])
    graph.add("TestSaveText", text=[places, 0], path="places.txt")
    compared(comfy, graph, ways)
    assert set(json.loads(comfy.output("places.txt").read_text())) == {"meta"}


# Shapes (rows, columns) of layers of the tiny Wan model, by their names in a LoRA's file.
LORA_LAYERS = {"blocks.0.self_attn.q": (256, 256), "blocks.1.ffn.0": (256, 256), "head.head": (64, 256)}


@pytest.fixture(scope="module")
def loras(comfy) -> list[str]:
    """File names of two LoRAs: one of low rank, one with differences of whole weights."""
    folder = comfy.server.base_directory / "models" / "loras"
    folder.mkdir(parents=True, exist_ok=True)
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
    request, settings = graph.request(), {"steps": 2, "cfg": 3.0}
    ways = {
        "stock": graph.ksampler(graph.lora(before, loras[1], -0.5), *request, **settings),
        "ours": graph.ksampler(graph.lora([ours, 0], loras[1], -0.5), *request, **settings),
        "Parallel Sampler": graph.parallel_sampler(lora_loader, *request, **settings),
        "without": graph.ksampler(plain, *request, **settings),
    }
    # A changed fp8 weight is rounded stochastically.
    compared(comfy, graph, ways, TOLERANCE if kind == "wan_t2v" else 1e-3)


FLAGS = {  # of ComfyUI: those that its ranks get
    "--port 8190 --lowvram --preview-method auto": "",
    "--fp8_e4m3fn-unet --use-split-cross-attention": "--fp8_e4m3fn-unet --use-split-cross-attention",
    "--fast fp16_accumulation autotune --cpu": "--fast autotune fp16_accumulation",
    "--dont-upcast-attention --force-fp16 --novram": "--force-fp16 --dont-upcast-attention",
}


def test_ranks_get_the_flags_that_change_numbers_and_no_others(comfy):
    graph = Graph()
    found = {line: [graph.add("TestNumericFlags", line=line), 0] for line in FLAGS}
    assert latents(comfy, graph, {}, found) == FLAGS


def test_a_file_replaced_in_mid_run_never_shares_a_picture_with_the_one_before(comfy):
    """The file is replaced by a rename, as download tools do. The next prompt uses the new file."""

    def sampled(act=lambda: None):
        graph = AnyGraph(comfy, "wan_t2v")
        ours, request = graph.parallel(graph.stock(), ulysses=2), graph.request()
        node = graph.parallel_sampler([ours, 1], *request, steps=12, cfg=1.0)
        with comfy.amid(node[0], act):
            return latents(comfy, graph, {"found": node})["found"]

    def replace_file():
        part = path.with_suffix(".part")
        save_file({name: 1.1 * value for name, value in load_file(path).items()}, part)
        part.replace(path)

    expected = sampled()
    (path,) = (comfy.server.base_directory / "models").rglob("any_wan_t2v.safetensors")
    before = path.read_bytes()
    try:
        comfy.forget()
        assert relative_difference(sampled(replace_file), expected) <= TOLERANCE
        comfy.forget()
        assert relative_difference(sampled(), expected) > 100 * TOLERANCE
    finally:
        path.write_bytes(before)


@pytest.mark.parametrize(
    ("dtype", "scale"), [("default", 1.0), ("default", 1.5), ("bfloat16", 1.0), ("float8_e4m3fn", 1.0)]
)
def test_the_file_that_another_packs_loader_names_is_enough(comfy, dtype, scale):
    """A weight that the loader has changed is sent with the job."""
    graph = AnyGraph(comfy, "flux")
    stock = [graph.add("TestPackLoader", model_name=graph.file, dtype=dtype, scale=scale), 0]
    request = graph.request()
    ways = {
        "stock": graph.ksampler(stock, *request, steps=2),
        "ours": graph.ksampler([graph.parallel(stock, ulysses=2), 0], *request, steps=2),
    }
    compared(comfy, graph, ways)
