"""LoRAs that prompt hooks schedule give the stock latent with stock samplers and ours; the base stays unchanged."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file, save_file

from any_graphs import AnyGraph
from any_runs import latents
from comfyui_client import PromptFailed
from differences import relative_difference
from graphs import OURS, STOCK, Graph

TOLERANCE = 1e-4  # of the largest value of the stock latent, in fp32
SAMPLING = {"cfg": 2.0, "steps": 4, "sampler_name": "euler"}


@pytest.fixture(scope="module")
def unet(comfy):
    return comfy.write_flux("tiny_hooked.safetensors")


class Hooked(Graph):
    """A graph of prompts with hooks."""

    def hook(self, lora: str, strength: float = 1.0, before=None, keyframes=()) -> list:
        """Adds a LoRA hook to the hooks `before`. `keyframes`: (start in 0..1, factor of the strength), in order."""
        given = {} if before is None else {"prev_hooks": before}
        hook = [
            self.add("CreateHookLoraModelOnly", lora_name=lora, strength_model=strength, **given),
            0,
        ]
        schedule: dict[str, list] = {}
        for start, times in keyframes:
            added = self.add("CreateHookKeyframe", strength_mult=times, start_percent=start, **schedule)
            schedule = {"prev_hook_kf": [added, 0]}
        if schedule:
            hook = [self.add("SetHookKeyframes", hooks=hook, hook_kf=schedule["prev_hook_kf"]), 0]
        return hook


def sampled(comfy, unet, prompts, choice, base=None) -> dict:
    """Returns the latents of one request: on the stock model, on ours, by Parallel Sampler, and on ours without hooks.
    `prompts(graph)`: returns (positive, negative); `base`: a LoRA for the whole run."""
    graph = Hooked()
    ours = parallel = graph.model(OURS, unet, "cpu:2", **choice)
    stock = graph.model(STOCK, unet)
    parallel = [ours[0], 0]
    if base is not None:
        stock, ours = (graph.lora(model, base, 0.5) for model in (stock, ours))
        parallel = [
            graph.add("ParallelLoraLoader", parallel_model=parallel, lora_name=base, strength=0.5),
            0,
        ]
    request = (*prompts(graph), graph.latent())
    resident = graph.parallel_sampler(parallel, *request, **SAMPLING)
    by_name = {
        "stock": graph.ksampler(stock, *request, **SAMPLING),
        "ours": graph.ksampler(ours, *request, **SAMPLING),
        "sampler": resident,
        "plain": graph.ksampler(ours, graph.text(1), graph.text(2), request[-1], **SAMPLING),
    }
    return latents(comfy, graph, by_name, {"report": [resident[0], 1]})


def assert_equal_to_stock(found: dict) -> None:
    for way in ("ours", "sampler"):
        assert relative_difference(found[way], found["stock"]) <= TOLERANCE, f"{way}\n{found['report']}"
    assert relative_difference(found["plain"], found["stock"]) > 100 * TOLERANCE, "hooks change something"


def test_strengths_that_change_with_the_steps(comfy, unet, loras):
    def prompts(graph):
        hook = graph.hook(loras["kohya"], keyframes=[(0.0, 1.0), (0.4, 0.3), (0.7, 0.0)])
        return graph.hooked(graph.text(1), hook), graph.hooked(graph.text(2), hook)

    found = sampled(comfy, unet, prompts, {"ulysses": 2})
    assert_equal_to_stock(found)
    assert "result: exact" in found["report"]


@pytest.mark.parametrize("choice", [{"cfg": 2}, {"tensor": 2}], ids=str)
def test_one_prompt_with_hooks_beside_one_without_over_a_lora_of_the_whole_run(comfy, unet, loras, choice):
    def prompts(graph):
        first = graph.hook(loras["kohya"], 0.7)
        return graph.hooked(graph.text(1), graph.hook(loras["lokr"], -0.6, before=first)), graph.text(2)

    found = sampled(comfy, unet, prompts, choice, base=loras["peft, alpha"])
    assert_equal_to_stock(found)


@pytest.mark.parametrize("choice", [{"ring": 2}, {"tensor": 2}], ids=str)
def test_prompts_of_two_loras_share_the_image_and_the_steps(comfy, unet, loras, choice):
    def prompts(graph):
        mask = [graph.add("SolidMask", value=0.6, width=128, height=96), 0]
        early = [graph.add("ConditioningTimestepsRange", start_percent=0.0, end_percent=0.5), 0]
        one = graph.hooked(graph.text(1), graph.hook(loras["kohya"]), mask=mask)
        other = graph.hooked(graph.text(3), graph.hook(loras["loha"], 0.8), timesteps=early)
        return graph.combined(one, other), graph.text(2)

    assert_equal_to_stock(sampled(comfy, unet, prompts, choice))


def test_any_model_has_them_too_and_its_weights_come_back(comfy, unet, loras):
    graph = Hooked()
    stock = graph.model(STOCK, unet)
    strategy = graph.strategy("cpu:2", ulysses=2, shard_weights=True)
    node = graph.add("ParallelModel", model=stock, strategy=strategy)
    hook = graph.hook(loras["kohya"], keyframes=[(0.0, 0.0), (0.5, 1.0)])
    request = (graph.hooked(graph.text(1), hook), graph.text(2), graph.latent())
    plain = (graph.text(1), *request[1:])
    resident = graph.parallel_sampler([node, 1], *request, **SAMPLING)
    by_name = {
        "stock": graph.ksampler(stock, *request, **SAMPLING),
        "ours": graph.ksampler([node, 0], *request, **SAMPLING),
        "sampler": resident,
        "plain": graph.ksampler(stock, *plain, **SAMPLING),
        "after": graph.parallel_sampler([node, 1], *plain, **SAMPLING),
    }
    found = latents(comfy, graph, by_name, {"report": [resident[0], 1]})
    assert_equal_to_stock(found)
    assert relative_difference(found["after"], found["plain"]) <= TOLERANCE


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
    latent = graph.ksampler(graph.model(OURS, unet, "cpu:2"), prompt, graph.text(2), graph.latent())
    with pytest.raises(PromptFailed, match=words):
        comfy.sample(graph.prompt, latent)


@pytest.mark.parametrize(("kind", "choice"), [("unet", {"cfg": 2}), ("sd3", {"tensor": 3})])
def test_another_model_in_the_place_of_a_lora_gives_the_stock_latent(comfy, kind, choice):
    graph = AnyGraph(comfy, kind)
    folder = comfy.server.base_directory / "models" / "checkpoints"
    other = {name: weight * 1.2 for name, weight in load_file(folder / graph.file).items()}
    save_file(other, folder / f"other_{kind}.safetensors")
    hook = graph.add(
        "CreateHookModelAsLoraModelOnly", ckpt_name=f"other_{kind}.safetensors", strength_model=0.5
    )
    positive, *others = graph.request()
    stock = graph.stock()
    request = (graph.hooked(positive, [hook, 0]), *others)
    ways = {
        "stock": graph.ksampler(stock, *request, **SAMPLING),
        "ours": graph.ksampler([graph.parallel(stock, **choice), 0], *request, **SAMPLING),
        "plain": graph.ksampler(stock, positive, *others, **SAMPLING),
    }
    found = latents(comfy, graph, ways)
    assert relative_difference(found["ours"], found["stock"]) <= TOLERANCE
    assert relative_difference(found["plain"], found["stock"]) > 100 * TOLERANCE, "the hook changes something"
