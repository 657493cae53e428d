"""LoRAs on our MODEL and PARALLEL_MODEL give the stock latent in every layout, swap without a load, leave no trace."""

from __future__ import annotations

import os
from math import prod

import pytest
import torch
from safetensors.torch import save_file

from any_runs import latents
from comfyui_client import PromptFailed
from differences import relative_difference
from graphs import AXES, OURS, STOCK, Graph
from lora_files import LAYOUTS, of_all_layers

TOLERANCE = 1e-4  # of the largest value of the stock latent, in fp32
ULYSSES = {"ulysses": 2}
WAYS = ("stock", "ours", "parallel")
STACK = (("kohya", 0.8), ("peft, alpha", -0.6))


@pytest.fixture(scope="module")
def unet(comfy):
    return comfy.write_flux("tiny_two_blocks.safetensors", double_blocks=2, single_blocks=2)


def run(comfy, unet, loras, stack, choice=ULYSSES, ways=WAYS, sampler="euler", **sampling) -> dict:
    """Returns one request's latents with a stack of LoRAs by way: stock, our MODEL, PARALLEL_MODEL; and "report"."""
    graph = Graph()
    request = (graph.text(1), graph.text(2), graph.latent())
    settings = {"cfg": 2.0, "steps": 2, "sampler_name": sampler, **sampling}
    world_size = prod(value for name, value in choice.items() if name in AXES)
    models = {"ours": graph.model(OURS, unet, f"cpu:{world_size}", **choice)}
    if "stock" in ways:
        models["stock"] = graph.model(STOCK, unet)
    parallel = [models["ours"][0], 0]
    for name, strength in stack:
        for kind, model in models.items():
            models[kind] = graph.lora(model, loras[name], strength)
        loader = graph.add(
            "ParallelLoraLoader", parallel_model=parallel, lora_name=loras[name], strength=strength
        )
        parallel = [loader, 0]
    found = {
        kind: graph.ksampler(model, *request, **settings) for kind, model in models.items() if kind in ways
    }
    found["parallel"] = graph.parallel_sampler(parallel[0], *request, **settings)
    return latents(comfy, graph, found, {"report": [found["parallel"][0], 1]})


def assert_equal_to_stock(found: dict) -> None:
    for way in ("ours", "parallel"):
        assert relative_difference(found[way], found["stock"]) <= TOLERANCE, f"{way}\n{found['report']}"


@pytest.fixture(scope="module")
def plain(comfy, unet, loras):
    return run(comfy, unet, loras, ())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_lora_gives_the_stock_latent_in_every_layout(comfy, unet, loras, plain, layout):
    found = run(comfy, unet, loras, [(layout, 0.9)])
    assert_equal_to_stock(found)
    assert relative_difference(found["stock"], plain["stock"]) > 100 * TOLERANCE, (
        "there was something to apply"
    )
    assert "LoRA: " in found["report"]


def test_a_lora_of_every_layer_of_a_deep_model_gives_the_stock_latent(comfy, loras):
    """Trainers write files of hundreds of tensors, all of which travel in one message."""
    unet = comfy.write_flux("tiny_deep.safetensors", double_blocks=19, single_blocks=1)
    tensors = of_all_layers(double_blocks=19)
    assert len(tensors) == 456
    folder = comfy.server.base_directory / "models" / "loras"
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / "deep.safetensors")
    found = run(comfy, unet, loras | {"deep": "deep.safetensors"}, [("deep", 0.5)])
    assert_equal_to_stock(found)
    assert "LoRA: 152 weights changed" in found["report"]


@pytest.mark.parametrize(
    "choice",
    [
        {"ring": 2, "shard_weights": True},
        {"cfg": 2, "offload_weights": True},
        {"pipefusion": 2, "warmup_steps": 2},
    ],
    ids=lambda choice: " ".join(f"{name}{value}" for name, value in choice.items()),
)
def test_a_stack_of_two_gives_the_stock_latent_under_every_strategy(comfy, unet, loras, choice):
    found = run(comfy, unet, loras, STACK, choice)
    assert_equal_to_stock(found)
    assert "result: exact" in found["report"]


def test_changed_halves_are_rounded_to_what_the_file_has(comfy, loras):
    """ComfyUI on a CPU holds a bf16 file in fp32 and so does not round; on GPUs it rounds as we do everywhere."""
    unet = comfy.write_flux("tiny_bf16.safetensors", dtype=torch.bfloat16)
    bare, found = run(comfy, unet, loras, ()), run(comfy, unet, loras, STACK)
    assert_equal_to_stock(bare)
    for way in ("ours", "parallel"):
        assert relative_difference(found[way], found["stock"]) <= 1e-2
    assert relative_difference(found["stock"], bare["stock"]) > 0.1


def test_a_lora_in_bypass_mode_gives_the_stock_latent(comfy, unet, loras, plain):
    graph = Graph()
    request = (graph.text(1), graph.text(2), graph.latent())
    ways = {}
    for kind in (STOCK, OURS):
        inputs = {"model": graph.model(kind, unet, "cpu:2", **ULYSSES), "strength_model": 0.8}
        loaded = graph.add("LoraLoaderBypassModelOnly", lora_name=loras["kohya"], **inputs)
        ways[kind] = graph.ksampler([loaded, 0], *request, cfg=2.0, steps=2)
    found = latents(comfy, graph, ways)
    assert relative_difference(found[OURS], found[STOCK]) <= TOLERANCE
    assert relative_difference(found[STOCK], plain["stock"]) > 100 * TOLERANCE


def test_other_strengths_and_stacks_load_nothing_and_the_base_comes_back_bit_for_bit(
    comfy, unet, loras, plain
):
    first = run(comfy, unet, loras, [("kohya", 1.0)], ways=("parallel",))
    for stack, changed in (
        ([("kohya", 0.5)], 6),
        ([("kohya", 0.5), ("lokr", 1.0)], 6),
        ([("kohya", 0.5), ("lokr", -1.0)], 6),
        ([("kohya", 0.5), ("lokr", -1.0), ("loha", 1.0)], 7),
        ([("kohya", 1.0)], 6),
    ):
        found = run(comfy, unet, loras, stack, ways=("parallel",))
        assert "load: 0 s (weights were warm)" in found["report"]
        assert f"LoRA: {changed} weights changed" in found["report"]
    assert found["parallel"].equal(first["parallel"])
    bare = run(comfy, unet, loras, (), ways=("parallel",))
    assert "load: 0 s (weights were warm)" in bare["report"]
    assert "LoRA" not in bare["report"]
    assert bare["parallel"].equal(plain["parallel"])
    assert_equal_to_stock(run(comfy, unet, loras, (), seed=8))


@pytest.mark.parametrize("lora", ["both", "text"])
def test_the_loader_with_a_clip_patches_the_model_here_and_leaves_the_clip_to_comfyui(
    comfy, unet, loras, plain, lora
):
    graph = Graph()
    ways = {}
    for kind in (STOCK, OURS):
        model = graph.model(kind, unet, "cpu:2", **ULYSSES)
        clip = [graph.add("TestClip"), 0]
        loaded = graph.add(
            "LoraLoader", model=model, clip=clip, lora_name=loras[lora], strength_model=0.7, strength_clip=0.5
        )
        request = (graph.text(1), graph.text(2), graph.latent())
        ways[kind] = graph.ksampler([loaded, 0], *request, cfg=2.0, steps=2)
    found = latents(comfy, graph, ways)
    assert relative_difference(found[OURS], found[STOCK]) <= TOLERANCE
    assert (relative_difference(found[OURS], plain["ours"]) > 100 * TOLERANCE) == (lora == "both")


def load_alone(comfy, unet, name: str) -> PromptFailed:
    """Runs Parallel LoRA Loader with this file and returns its error."""
    graph = Graph()
    model = [graph.parallel_loader(unet, "cpu:1"), 0]
    loaded = graph.add("ParallelLoraLoader", parallel_model=model, lora_name=name, strength=1.0)
    graph.add("PreviewAny", source=[loaded, 0])
    with pytest.raises(PromptFailed) as failure:
        comfy.run(graph.prompt)
    assert failure.value.node_type == "ParallelLoraLoader"
    return failure.value


def test_a_file_that_comfyui_cannot_read_as_a_lora_is_refused_by_its_name(comfy, unet, loras):
    folder = comfy.server.base_directory / "models" / "loras"
    (folder / "truncated.safetensors").write_bytes((folder / loras["kohya"]).read_bytes()[:1000])
    for name in (loras["vector alpha"], "truncated.safetensors"):
        failure = load_alone(comfy, unet, name)
        assert failure.exception_type.endswith("RequestError")
        assert failure.exception_message.startswith(f"{name} cannot be read as a LoRA (")


class Hostile:
    """An object that runs code when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_pickle_is_refused_and_runs_nothing(comfy, unet, loras, tmp_path):
    name, made = "hostile.pt", tmp_path / "made by the pickle"
    file = comfy.server.base_directory / "models" / "loras" / name
    torch.save({"lora": Hostile(made)}, file)
    try:
        failure = load_alone(comfy, unet, name)
    finally:
        file.unlink()  # other tests read the whole list
    assert failure.exception_message.startswith(f"{name} cannot be read as a LoRA (")
    assert not made.exists()


def test_a_file_name_that_is_no_text_is_refused_in_words(comfy, unet, loras):
    folder = comfy.server.base_directory / "models" / "loras"
    name = os.fsdecode(b"odd\xff.safetensors")
    (folder / name).write_bytes((folder / loras["kohya"]).read_bytes())
    try:
        failure = load_alone(comfy, unet, name)
    finally:
        (folder / name).unlink()  # other tests read the whole list
    assert failure.exception_type.endswith("CheckpointError")
    assert "not valid UTF-8. Rename it." in failure.exception_message


SHAPES = r"double_blocks\.0\.img_attn\.proj\.weight has the shape \[256, 256\].*\[512, 4\]"


@pytest.mark.parametrize(
    ("loader", "lora", "words"),
    [
        ("ParallelLoraLoader", "wrong shapes", SHAPES),
        ("LoraLoaderModelOnly", "wrong shapes", SHAPES),
        ("LoraLoaderModelOnly", "no key", "none of its keys is known"),
        ("LoraLoaderModelOnly", "nan", r"double_blocks\.0\.img_attn\.proj\.weight holds NaN"),
    ],
)
def test_a_lora_that_does_not_fit_is_refused_where_it_is_loaded(comfy, unet, loras, loader, lora, words):
    graph = Graph()
    model = graph.model(OURS, unet, "cpu:2", **ULYSSES)
    if loader == "ParallelLoraLoader":
        loaded = graph.add(loader, parallel_model=[model[0], 0], lora_name=loras[lora], strength=1.0)
        latent = graph.parallel_sampler(loaded, graph.text(1), graph.text(2), graph.latent())
    else:
        loaded = graph.add(loader, model=model, lora_name=loras[lora], strength_model=1.0)
        latent = graph.ksampler([loaded, 0], graph.text(1), graph.text(2), graph.latent())
    with pytest.raises(PromptFailed, match=words) as failure:
        comfy.sample(graph.prompt, latent)
    assert failure.value.node_type == loader
    assert failure.value.exception_type.endswith("RequestError")


def test_slices_of_layers_have_loras_too_and_lose_them_again(comfy, unet, loras, plain):
    tensor = {"tensor": 2}
    assert_equal_to_stock(run(comfy, unet, loras, STACK, tensor))
    without = run(comfy, unet, loras, (), tensor, ways=("ours",))
    assert relative_difference(without["ours"], plain["stock"]) <= TOLERANCE
    both = {**tensor, "shard_weights": True, "cfg": 2}
    with pytest.raises(PromptFailed, match="set shard_weights to off"):
        run(comfy, unet, loras, STACK, both, ways=("ours",))
