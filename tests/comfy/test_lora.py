"""LoRAs on our MODEL and PARALLEL_MODEL, and LoRAs that prompt hooks schedule, give the stock latent in every layout.

They swap without a load and leave no trace.
"""

from __future__ import annotations

import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from any_graphs import AnyGraph
from any_runs import TOLERANCE, compared, latents, refusal
from differences import relative_difference
from graphs import OURS, STOCK, Graph, devices_of
from hostile_bytes import Touches
from lora_files import LAYOUTS, of_all_layers

ULYSSES = {"ulysses": 2}
STACK = (("kohya", 0.8), ("peft, alpha", -0.6))
SAMPLING = {"cfg": 2.0, "steps": 2}


def stacked(graph: Graph, model: list, loras: dict[str, str], stack) -> list:
    for name, strength in stack:
        model = graph.lora(model, loras[name], strength)
    return model


def stacked_in_parallel(graph: Graph, parallel: list, loras: dict[str, str], stack) -> list:
    for name, strength in stack:
        inputs = {"lora_name": loras[name], "strength": strength}
        parallel = [graph.add("ParallelLoraLoader", parallel_model=parallel, **inputs), 0]
    return parallel


def assert_stocks(
    comfy, unet, loras, stack, choice=ULYSSES, tolerance=TOLERANCE, by=("Parallel Sampler",)
) -> str:
    """Asserts that a stack of LoRAs counts as in stock on our PARALLEL_MODEL. Returns the report. `by`: "KSampler" too
    for ComfyUI's own loader on our MODEL; it and Parallel LoRA Loader call one function of ComfyUI."""
    graph = Graph()
    ours = graph.model(OURS, unet, devices_of(choice), **choice)
    stock = graph.model(STOCK, unet)
    ways = {
        "KSampler": stacked(graph, ours, loras, stack),
        "Parallel Sampler": stacked_in_parallel(graph, [ours[0], 0], loras, stack),
    }
    models = {"without": stock, "stock": stacked(graph, stock, loras, stack)} | {way: ways[way] for way in by}
    return compared(comfy, graph, graph.sampled_by(models, graph.request(), **SAMPLING), tolerance)["report"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_lora_gives_the_stock_latent_in_every_layout(comfy, unet, loras, layout):
    assert "LoRA: " in assert_stocks(comfy, unet, loras, [(layout, 0.9)])


def test_a_lora_of_every_layer_of_a_deep_model_gives_the_stock_latent(comfy, loras):
    """Trainers write files of hundreds of tensors, all of which travel in one message."""
    unet = comfy.write_flux("tiny_deep.safetensors", double_blocks=19, single_blocks=1)
    tensors = of_all_layers(double_blocks=19)
    assert len(tensors) == 456
    save_file(
        {key: tensor.contiguous() for key, tensor in tensors.items()},
        comfy.models("loras") / "deep.safetensors",
    )
    report = assert_stocks(comfy, unet, loras | {"deep": "deep.safetensors"}, [("deep", 0.5)])
    assert "LoRA: 152 weights changed" in report


@pytest.mark.parametrize(
    "choice",
    [
        {"ring": 2, "shard_weights": True},
        {"cfg": 2, "offload_weights": True},
        {"pipefusion": 2, "warmup_steps": 2},
        {"tensor": 2},
        {"tensor": 2, "cfg": 2, "shard_weights": True},
    ],
    ids=lambda choice: " ".join(f"{name}{value}" for name, value in choice.items()),
)
def test_a_stack_of_two_gives_the_stock_latent_under_every_strategy(comfy, unet, loras, choice):
    report = assert_stocks(comfy, unet, loras, STACK, choice, by=("KSampler", "Parallel Sampler"))
    assert "result: exact" in report


def test_changed_halves_are_rounded_to_what_the_file_has(comfy, loras):
    """ComfyUI on a CPU holds a bf16 file in fp32 and so does not round; on GPUs it rounds as we do everywhere."""
    unet = comfy.write_flux("tiny_bf16.safetensors", dtype=torch.bfloat16)
    assert_stocks(comfy, unet, loras, STACK, tolerance=1e-2)


@pytest.mark.parametrize(
    "choice",
    [{"cfg": 2, "shard_weights": True}, {"tensor": 2}, {"tensor": 2, "cfg": 2, "shard_weights": True}],
)
def test_changed_fp8_weights_are_rounded_as_in_stock_wherever_they_are_shared_out(comfy, choice):
    graph = AnyGraph(comfy, "wan_fp8")
    weights = load_file(comfy.models() / graph.file)
    name, lora, draw = "diffusion_model.blocks.0", {}, torch.Generator().manual_seed(7)
    for layer in ("self_attn.q", "self_attn.o", "ffn.0", "ffn.2"):
        rows, columns = weights[f"blocks.0.{layer}.weight"].shape
        lora[f"{name}.{layer}.lora_up.weight"] = torch.randn(rows, 4, generator=draw)
        lora[f"{name}.{layer}.lora_down.weight"] = torch.randn(4, columns, generator=draw) * 0.05
    width = weights["blocks.0.self_attn.norm_q.weight"].shape
    lora[f"{name}.self_attn.norm_q.diff"] = torch.randn(width, generator=draw)
    save_file(lora, comfy.models("loras") / "wan_fp8.safetensors")
    stock = graph.stock()
    models = {"stock": stock, "ours": [graph.parallel(stock, **choice), 0]}
    models = {way: graph.lora(model, "wan_fp8.safetensors") for way, model in models.items()}
    compared(comfy, graph, graph.sampled_by(models | {"without": stock}, graph.request(), **SAMPLING))


@pytest.mark.parametrize(
    ("loader", "lora"),
    [("LoraLoaderBypassModelOnly", "kohya"), ("LoraLoader", "both"), ("LoraLoader", "text")],
)
def test_a_lora_of_comfyuis_other_loaders_gives_the_stock_latent(comfy, unet, loras, loader, lora):
    """Bypass mode, and the loader with a CLIP, which patches the model here and leaves the CLIP to ComfyUI."""
    graph = Graph()
    inputs = {"lora_name": loras[lora], "strength_model": 0.7}
    if loader == "LoraLoader":
        clip = graph.add("TestEncoder", kind="clip_l", clip_name="lora.safetensors", draw=0)
        inputs |= {"clip": [clip, 0], "strength_clip": 0.5}
    models = {
        kind: [graph.add(loader, model=graph.model(kind, unet, "cpu:2", **ULYSSES), **inputs), 0]
        for kind in (STOCK, OURS)
    }
    models["unchanged" if lora == "text" else "without"] = graph.model(STOCK, unet)
    compared(comfy, graph, graph.sampled_by(models, graph.request(), **SAMPLING))


def resident(comfy, unet, loras, stack=(), choice=ULYSSES) -> tuple[torch.Tensor, str]:
    """Returns Parallel Sampler's latent and report."""
    graph = Graph()
    parallel = [graph.parallel_loader(unet, devices_of(choice), **choice), 0]
    latent = graph.parallel_sampler(stacked_in_parallel(graph, parallel, loras, stack), *graph.request())
    found = latents(comfy, graph, {"ours": latent})
    return found["ours"], found["report"]


@pytest.mark.parametrize(
    "choice",
    [
        {"tensor": 2},
        {"ulysses": 2, "shard_weights": True},
        {"tensor": 2, "cfg": 2, "shard_weights": True},
    ],
)
def test_parts_of_weights_lose_loras_again(comfy, unet, loras, choice):
    stacks = ((), STACK, STACK[:1], STACK, ())
    base, changed, other, again, after = (resident(comfy, unet, loras, one, choice)[0] for one in stacks)
    assert after.equal(base) and again.equal(changed)
    assert not changed.equal(base) and not changed.equal(other)


def test_other_strengths_and_stacks_load_nothing_and_the_base_comes_back_bit_for_bit(comfy, unet, loras):
    base, _ = resident(comfy, unet, loras)
    first, _ = resident(comfy, unet, loras, [("kohya", 1.0)])
    for stack, changed in (
        ([("kohya", 0.5)], 6),
        ([("kohya", 0.5), ("lokr", 1.0)], 6),
        ([("kohya", 0.5), ("lokr", -1.0)], 6),
        ([("kohya", 0.5), ("lokr", -1.0), ("loha", 1.0)], 7),
        ([("kohya", 1.0)], 6),
    ):
        latent, report = resident(comfy, unet, loras, stack)
        assert "load: 0 s (weights were warm)" in report
        assert f"LoRA: {changed} weights changed" in report
    assert latent.equal(first)
    latent, report = resident(comfy, unet, loras)
    assert "load: 0 s (weights were warm)" in report and "LoRA" not in report
    assert latent.equal(base)


def load_alone(comfy, unet, name: str) -> tuple[str, str]:
    """Runs Parallel LoRA Loader with this file and returns its error's type and message."""
    graph = Graph()
    model = [graph.parallel_loader(unet, "cpu:1"), 0]
    loaded = [graph.add("ParallelLoraLoader", parallel_model=model, lora_name=name, strength=1.0), 0]
    failure = refusal(comfy, graph, graph.parallel_sampler(loaded, *graph.request()))
    assert failure.node_type == "ParallelLoraLoader"
    return failure.exception_type.rpartition(".")[2], failure.exception_message


def test_a_file_that_comfyui_cannot_read_as_a_lora_is_refused_by_its_name(comfy, unet, loras, tmp_path):
    made, folder = tmp_path / "made by the pickle", comfy.models("loras")
    truncated, pickled, odd = "truncated.safetensors", "hostile.pt", os.fsdecode(b"odd\xff.safetensors")
    whole = (folder / loras["kohya"]).read_bytes()
    (folder / truncated).write_bytes(whole[:1000])
    (folder / odd).write_bytes(whole)
    torch.save({"lora": Touches(made)}, folder / pickled)
    try:
        for name in (loras["vector alpha"], truncated, pickled):
            kind, message = load_alone(comfy, unet, name)
            assert kind == "RequestError" and message.startswith(f"{name} cannot be read as a LoRA (")
        kind, message = load_alone(comfy, unet, odd)
        assert kind == "CheckpointError" and "not valid UTF-8. Rename it." in message
    finally:
        for name in (truncated, pickled, odd):
            (folder / name).unlink()  # other tests read the whole list
    assert not made.exists()


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
    model, stack = graph.model(OURS, unet, "cpu:2", **ULYSSES), [(lora, 1.0)]
    if loader == "ParallelLoraLoader":
        parallel = stacked_in_parallel(graph, [model[0], 0], loras, stack)
        latent = graph.parallel_sampler(parallel, *graph.request())
    else:
        latent = graph.ksampler(stacked(graph, model, loras, stack), *graph.request())
    failure = refusal(comfy, graph, latent, words)
    assert failure.node_type == loader
    assert failure.exception_type.endswith("RequestError")


SCHEDULED = {"cfg": 2.0, "steps": 4}


class Hooked(Graph):
    """A graph of prompts with hooks."""

    def hook(self, lora: str, strength: float = 1.0, before=None, keyframes=()) -> list:
        """Adds a LoRA hook to the hooks `before`. `keyframes`: (start in 0..1, factor of the strength), in order."""
        given = {} if before is None else {"prev_hooks": before}
        hook = [self.add("CreateHookLoraModelOnly", lora_name=lora, strength_model=strength, **given), 0]
        schedule: dict[str, list] = {}
        for start, times in keyframes:
            added = self.add("CreateHookKeyframe", strength_mult=times, start_percent=start, **schedule)
            schedule = {"prev_hook_kf": [added, 0]}
        if schedule:
            hook = [self.add("SetHookKeyframes", hooks=hook, hook_kf=schedule["prev_hook_kf"]), 0]
        return hook


def changing_strengths(graph: Hooked, loras: dict) -> tuple[list, list]:
    hook = graph.hook(loras["kohya"], keyframes=[(0.0, 1.0), (0.4, 0.3), (0.7, 0.0)])
    return graph.hooked(graph.text(1), hook), graph.hooked(graph.text(2), hook)


def one_prompt_of_two(graph: Hooked, loras: dict) -> tuple[list, list]:
    first = graph.hook(loras["kohya"], 0.7)
    return graph.hooked(graph.text(1), graph.hook(loras["lokr"], -0.6, before=first)), graph.text(2)


def prompts_that_share_the_image_and_the_steps(graph: Hooked, loras: dict) -> tuple[list, list]:
    mask = [graph.add("SolidMask", value=0.6, width=128, height=96), 0]
    early = [graph.add("ConditioningTimestepsRange", start_percent=0.0, end_percent=0.5), 0]
    one = graph.hooked(graph.text(1), graph.hook(loras["kohya"]), mask=mask)
    other = graph.hooked(graph.text(3), graph.hook(loras["loha"], 0.8), timesteps=early)
    return graph.combined(one, other), graph.text(2)


@pytest.mark.parametrize(
    ("prompts", "choice", "base"),
    [
        (changing_strengths, {"ulysses": 2}, None),
        (one_prompt_of_two, {"cfg": 2}, "peft, alpha"),
        (one_prompt_of_two, {"tensor": 2}, "peft, alpha"),
        (one_prompt_of_two, {"tensor": 2, "cfg": 2, "shard_weights": True}, "peft, alpha"),
        (prompts_that_share_the_image_and_the_steps, {"ring": 2}, None),
        (prompts_that_share_the_image_and_the_steps, {"tensor": 2}, None),
    ],
)
def test_hooks_of_prompts_give_the_stock_latent(comfy, unet, loras, prompts, choice, base):
    """`base`: a LoRA for the whole run."""
    graph = Hooked()
    parallel, stock = [graph.parallel_loader(unet, devices_of(choice), **choice), 0], graph.model(STOCK, unet)
    if base is not None:
        stock = graph.lora(stock, loras[base])
        parallel = stacked_in_parallel(graph, parallel, loras, [(base, 0.8)])
    request = (*prompts(graph, loras), graph.latent())
    ways = graph.sampled_by({"stock": stock, "Parallel Sampler": parallel}, request, **SCHEDULED)
    ways["without"] = graph.ksampler(stock, *graph.request(), **SCHEDULED)
    assert "result: exact" in compared(comfy, graph, ways)["report"]


@pytest.mark.parametrize(
    "choice", [{"cfg": 2, "shard_weights": True}, {"tensor": 2, "cfg": 2, "shard_weights": True}]
)
def test_hooks_of_prompts_round_shared_fp8_weights_as_they_round_whole_ones(comfy, loras, choice):
    """Stock on a CPU holds a plain fp8 file in fp32 and rounds no changed weight."""
    graph, found = Hooked(), {}
    unet = comfy.write_flux("tiny_fp8.safetensors", dtype=torch.float8_e4m3fn)
    prompts, latent = one_prompt_of_two(graph, loras), graph.latent()
    for way, devices in {"whole": {"cfg": 2}, "parts": choice}.items():
        model = graph.lora(graph.model(OURS, unet, devices_of(devices), **devices), loras["peft, alpha"])
        found[way] = graph.ksampler(model, *prompts, latent, **SAMPLING)
    found["without"] = graph.ksampler(model, graph.text(1), graph.text(2), latent, **SAMPLING)
    found = latents(comfy, graph, found)
    assert relative_difference(found["parts"], found["whole"]) <= TOLERANCE
    assert relative_difference(found["without"], found["whole"]) > 100 * TOLERANCE


def test_any_model_has_them_too_and_its_weights_come_back(comfy, unet, loras):
    graph = Hooked()
    stock = graph.model(STOCK, unet)
    strategy = graph.strategy("cpu:2", ulysses=2, shard_weights=True)
    node = graph.add("ParallelModel", model=stock, strategy=strategy)
    hook = graph.hook(loras["kohya"], keyframes=[(0.0, 0.0), (0.5, 1.0)])
    plain = graph.request()
    request = (graph.hooked(plain[0], hook), *plain[1:])
    models = {"stock": stock, "ours": [node, 0], "Parallel Sampler": [node, 1]}
    ways = graph.sampled_by(models, request, **SCHEDULED)
    ways["without"] = graph.ksampler(stock, *plain, **SCHEDULED)
    expected = compared(comfy, graph, ways)["without"]
    after = comfy.sample(graph.prompt, graph.parallel_sampler([node, 1], *plain, **SCHEDULED))
    assert relative_difference(after, expected) <= TOLERANCE


@pytest.mark.parametrize("choice", [{"tensor": 2}, {"tensor": 2, "cfg": 2, "shard_weights": True}])
def test_hooks_change_norms_over_heads_that_ranks_share(comfy, choice):
    graph = AnyGraph(comfy, "wan_t2v")
    name = "blocks.0.self_attn.norm_q"
    width = load_file(comfy.models() / graph.file)[f"{name}.weight"].shape
    norm = torch.randn(width, generator=torch.Generator().manual_seed(8))
    save_file({f"diffusion_model.{name}.diff": norm}, comfy.models("loras") / "wan_norm.safetensors")
    hook = graph.add("CreateHookLoraModelOnly", lora_name="wan_norm.safetensors", strength_model=1.0)
    stock, (positive, *others) = graph.stock(), graph.request()
    models = {"stock": stock, "ours": [graph.parallel(stock, **choice), 0]}
    ways = graph.sampled_by(models, (graph.hooked(positive, [hook, 0]), *others), **SAMPLING)
    ways["without"] = graph.ksampler(stock, positive, *others, **SAMPLING)
    compared(comfy, graph, ways)


def test_another_model_in_the_place_of_a_lora_gives_the_stock_latent(comfy):
    graph = AnyGraph(comfy, "sd3")
    folder = comfy.models("checkpoints")
    other = {name: weight * 1.2 for name, weight in load_file(folder / graph.file).items()}
    save_file(other, folder / "other_sd3.safetensors")
    hook = graph.add("CreateHookModelAsLoraModelOnly", ckpt_name="other_sd3.safetensors", strength_model=0.5)
    stock, (positive, *others) = graph.stock(), graph.request()
    models = {"stock": stock, "ours": [graph.parallel(stock, tensor=3), 0]}
    ways = graph.sampled_by(models, (graph.hooked(positive, [hook, 0]), *others), **SAMPLING)
    ways["without"] = graph.ksampler(stock, positive, *others, **SAMPLING)
    compared(comfy, graph, ways)


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        ("wrong shapes", r"has the shape \[256, 256\]"),
        ("no key", "none of its keys is known"),
        ("wider input, comfyui", r"makes img_in\.weight larger .* load it for the whole run"),
    ],
)
def test_one_that_does_not_fit_is_refused_by_what_is_wrong_with_it(comfy, unet, loras, lora, words):
    graph = Hooked()
    prompt = graph.hooked(graph.text(1), graph.hook(loras[lora]))
    ours = graph.model(OURS, unet, "cpu:2")
    refusal(comfy, graph, graph.ksampler(ours, prompt, graph.text(2), graph.latent()), words)
