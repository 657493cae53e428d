"""LoRAs that prompt hooks schedule give the stock latent with stock samplers and ours; the base stays unchanged."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file, save_file

from any_graphs import AnyGraph
from any_runs import TOLERANCE, compared, refusal
from differences import relative_difference
from graphs import OURS, STOCK, Graph

SAMPLING = {"cfg": 2.0, "steps": 4}


@pytest.fixture(scope="module")
def unet(comfy):
    return comfy.write_flux("tiny_hooked.safetensors")


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
        (prompts_that_share_the_image_and_the_steps, {"ring": 2}, None),
        (prompts_that_share_the_image_and_the_steps, {"tensor": 2}, None),
    ],
)
def test_hooks_of_prompts_give_the_stock_latent(comfy, unet, loras, prompts, choice, base):
    """`base`: a LoRA for the whole run."""
    graph = Hooked()
    ours, stock = graph.model(OURS, unet, "cpu:2", **choice), graph.model(STOCK, unet)
    parallel = [ours[0], 0]
    if base is not None:
        stock, ours = (graph.lora(model, loras[base], 0.5) for model in (stock, ours))
        of_base = {"lora_name": loras[base], "strength": 0.5}
        parallel = [graph.add("ParallelLoraLoader", parallel_model=parallel, **of_base), 0]
    request = (*prompts(graph, loras), graph.latent())
    ways = {
        "stock": graph.ksampler(stock, *request, **SAMPLING),
        "ours": graph.ksampler(ours, *request, **SAMPLING),
        "Parallel Sampler": graph.parallel_sampler(parallel, *request, **SAMPLING),
        "without": graph.ksampler(stock, *graph.request(), **SAMPLING),
    }
    assert "result: exact" in compared(comfy, graph, ways)["report"]


def test_any_model_has_them_too_and_its_weights_come_back(comfy, unet, loras):
    graph = Hooked()
    stock = graph.model(STOCK, unet)
    strategy = graph.strategy("cpu:2", ulysses=2, shard_weights=True)
    node = graph.add("ParallelModel", model=stock, strategy=strategy)
    hook = graph.hook(loras["kohya"], keyframes=[(0.0, 0.0), (0.5, 1.0)])
    plain = graph.request()
    request = (graph.hooked(plain[0], hook), *plain[1:])
    ways = {
        "stock": graph.ksampler(stock, *request, **SAMPLING),
        "ours": graph.ksampler([node, 0], *request, **SAMPLING),
        "Parallel Sampler": graph.parallel_sampler([node, 1], *request, **SAMPLING),
        "without": graph.ksampler(stock, *plain, **SAMPLING),
    }
    expected = compared(comfy, graph, ways)["without"]
    after = comfy.sample(graph.prompt, graph.parallel_sampler([node, 1], *plain, **SAMPLING))
    assert relative_difference(after, expected) <= TOLERANCE


@pytest.mark.parametrize(("kind", "choice"), [("unet", {"cfg": 2}), ("sd3", {"tensor": 3})])
def test_another_model_in_the_place_of_a_lora_gives_the_stock_latent(comfy, kind, choice):
    graph = AnyGraph(comfy, kind)
    folder = comfy.server.base_directory / "models" / "checkpoints"
    other = {name: weight * 1.2 for name, weight in load_file(folder / graph.file).items()}
    save_file(other, folder / f"other_{kind}.safetensors")
    hook = graph.add(
        "CreateHookModelAsLoraModelOnly", ckpt_name=f"other_{kind}.safetensors", strength_model=0.5
    )
    stock, (positive, *others) = graph.stock(), graph.request()
    prompt = graph.hooked(positive, [hook, 0])
    ways = {
        "without": graph.ksampler(stock, positive, *others, **SAMPLING),
        "stock": graph.ksampler(stock, prompt, *others, **SAMPLING),
        "ours": graph.ksampler([graph.parallel(stock, **choice), 0], prompt, *others, **SAMPLING),
    }
    compared(comfy, graph, ways)


@pytest.mark.parametrize(
    ("lora", "choice", "words"),
    [
        ("wrong shapes", {}, r"has the shape \[256, 256\]"),
        ("no key", {}, "none of its keys is known"),
        ("wider input, comfyui", {}, r"makes img_in\.weight larger .* load it for the whole run"),
        (
            "kohya",
            {"tensor": 2, "cfg": 2, "shard_weights": True},
            "set shard_weights to off or tensor_degree to 1",
        ),
    ],
)
def test_one_that_does_not_fit_is_refused_by_what_is_wrong_with_it(comfy, unet, loras, lora, choice, words):
    graph = Hooked()
    prompt = graph.hooked(graph.text(1), graph.hook(loras[lora]))
    ours = graph.model(OURS, unet, "cpu:4" if choice else "cpu:2", **choice)
    refusal(comfy, graph, graph.ksampler(ours, prompt, graph.text(2), graph.latent()), words)
