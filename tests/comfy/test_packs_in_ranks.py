"""Packs modelled on popular ones, whose functions, classes and state run in the ranks, and packs that fail there.

Two devices give the latent of one, whether the pack's node is before or behind Parallel Model. If a pack fails in a
rank, the error names it and the next prompt works.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from any_graphs import AnyGraph
from any_runs import TELLING, compared, latents, refusal, with_change
from comfyui_client import PromptFailed
from differences import relative_difference
from graphs import Graph
from lora_files import write_loras

TOLERANCE = 2e-6  # relative to the largest value of the stock latent, in fp32
PATIENCE = 3.0  # seconds for which ranks may stay silent


def _node(name: str, **settings) -> Callable[[AnyGraph, list], list]:
    return lambda graph, model: [graph.add(name, model=model, **settings), 0]


ULYSSES, CFG = {"ulysses": 2}, {"cfg": 2}
# name -> (kind of model, degrees, function that adds the node, sampler settings). Grouped by kind, so that each is
# loaded once.
CHANGES = {
    "embeddings in the attention": ("unet", ULYSSES, _node("TestEmbeddings", weight=0.8), {"cfg": 1.0}),
    "embeddings in the attention, with CFG": ("unet", ULYSSES, _node("TestEmbeddings", weight=0.8), {}),
    "an attention kernel, UNet": ("unet", ULYSSES, _node("TestAttentionKernel"), {"cfg": 1.0}),
    "random numbers for all rows": ("unet", CFG, _node("TestNoisyOutputs", weight=0.2), {}),
    "a norm over all rows": ("unet", CFG, _node("TestNormedOutputs"), {}),
    "two halves of the rows": ("unet", CFG, _node("TestJoinedPrompts", way="halves"), {}),
    "rows in another order": ("unet", CFG, _node("TestJoinedPrompts", way="flip"), {}),
    "a first half of the rows": ("unet", CFG, _node("TestJoinedPrompts", way="first half"), {}),
    "rows of two prompts": ("unet", CFG, _node("TestJoinedPrompts", way="two prompts"), {}),
    "keys of a first row": ("unet", CFG, _node("TestJoinedPrompts", way="attention"), {}),
    "keys of a first row, by queries": ("unet", ULYSSES, _node("TestJoinedPrompts", way="attention"), {}),
    "keys of a first row, Flux": ("flux", CFG, _node("TestJoinedPrompts", way="attention"), {}),
    "a ControlNet's output": ("unet", CFG, _node("TestControl"), {}),
    "a configuration": ("unet", CFG, _node("TestWiderConfiguration"), {}),
    "an attention kernel, Flux": ("flux", ULYSSES, _node("TestAttentionKernel"), {"cfg": 1.0}),
    "a step cache": (
        "flux",
        ULYSSES,
        _node("TestStepCache", limit=0.3, on_the_edge=False),
        {"cfg": 1.0, "steps": 6},
    ),
    "routes and threads": ("flux", ULYSSES, _node("TestRoutes"), {"cfg": 1.0}),
    "closures, Wan": ("wan_t2v", ULYSSES, _node("TestBlockClosure", blocks="blocks", weight=0.5), {}),
    "no attention in one block": ("ltx_video", ULYSSES, _node("TestBlockWithoutAttention", block=0), {}),
    "the same, with sound": ("ltx_sound", ULYSSES, _node("TestBlockWithoutAttention", block=0), {}),
    "video that does not hear": ("ltx_sound", ULYSSES, _node("TestSwitch", option="a2v_cross_attn"), {}),
    "a block that does not hear": (
        "ltx_sound",
        ULYSSES,
        _node("TestSwitchInBlock", option="a2v_cross_attn"),
        {},
    ),
    "sound that does not see": ("ltx_sound", ULYSSES, _node("TestSwitch", option="v2a_cross_attn"), {}),
}


# The devices may not share out the prompts of these with CFG 2.
JOINED = {
    "random numbers for all rows",
    "a norm over all rows",
    "two halves of the rows",
    "rows in another order",
    "a first half of the rows",
    "rows of two prompts",
    "keys of a first row",
    "keys of a first row, Flux",
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_pack_that_changes_the_model_gives_the_stock_latent(packs, case):
    kind, degrees, change, settings = CHANGES[case]
    settings = {"steps": 2, "cfg": 3.0, **settings}
    found = with_change(packs, AnyGraph(packs, kind), change, degrees, TOLERANCE, **settings)
    assert ("may look at several prompts" in found["report"]) == (case in JOINED)


@pytest.mark.parametrize("case", ["an attention kernel, Flux", "closures, Wan"])
def test_it_counts_where_blocks_are_to_be_compiled_too(packs, case):
    """A compiled block would ignore an attention kernel that the model options name."""
    kind, degrees, change, settings = CHANGES[case]
    graph = AnyGraph(packs, kind)
    source = graph.stock()
    strategy = graph.strategy("cpu:2", **degrees)
    compiled = [graph.add("ParallelModel", model=source, strategy=strategy, compile="blocks"), 0]
    models = {"without": source, "stock": change(graph, source), "ours": change(graph, compiled)}
    compared(
        packs,
        graph,
        graph.sampled_by(models, graph.request(), **{"steps": 2, "cfg": 3.0, **settings}),
        TOLERANCE,
    )


def _guided(
    graph: AnyGraph, model: list, request: tuple, sampler: str, guider: str = "CFGGuider", **settings
) -> list:
    """Returns the latent of a guider and a sampler of these classes. `settings`: inputs of the sampler's node."""
    positive, negative, latent = request
    guider = graph.add(guider, model=model, cfg=2.0, positive=positive, negative=negative)
    return [graph.custom_sampler(model, guider, graph.add(sampler, **settings), latent, steps=2), 0]


def test_a_guider_and_a_sampler_of_a_packs_classes_give_the_stock_latent(packs):
    graph = AnyGraph(packs, "wan_t2v")
    source, request = graph.stock(), graph.request()
    ours = [graph.parallel(source, ulysses=2), 0]
    ways = {
        "without": _guided(graph, source, request, "TestPackSampler", noise=0.2),
        "stock": _guided(graph, source, request, "TestPackSampler", "TestPackGuider", noise=0.2),
        "ours": _guided(graph, ours, request, "TestPackSampler", "TestPackGuider", noise=0.2),
    }
    compared(packs, graph, ways, TOLERANCE)


@pytest.mark.parametrize("kind", ["flux", "unet"])
def test_a_sampler_that_differentiates_the_model_gives_the_stock_latent(packs, kind):
    graph = AnyGraph(packs, kind)
    source, request = graph.stock(), graph.request()
    ours = [graph.parallel(source, ulysses=2), 0]
    ways = {
        "without": _guided(graph, source, request, "KSamplerSelect", sampler_name="euler"),
        "stock": _guided(graph, source, request, "TestTangentSampler"),
        "ours": _guided(graph, ours, request, "TestTangentSampler"),
    }
    compared(packs, graph, ways, TOLERANCE)


def test_with_weights_that_are_shared_out_it_is_refused(packs):
    graph = AnyGraph(packs, "flux")
    model = [graph.parallel(graph.stock(), ulysses=2, shard_weights=True), 0]
    latent = _guided(graph, model, graph.request(), "TestTangentSampler")
    refusal(packs, graph, latent, "differentiates the model .* set shard_weights to off")


def test_functions_that_choose_devices_or_begin_a_run_stay_in_comfyuis_process(packs):
    """Else each job would need their pack, which no rank can import."""
    graph = AnyGraph(packs, "flux")
    stock = graph.stock()
    models = {"stock": stock, "ours": [graph.parallel(stock, ulysses=2), 0]}
    ways = graph.sampled_by(models, graph.request(), steps=2)
    found = latents(packs, graph, ways, {"replaced": [graph.add("TestPlaces"), 0]})
    assert found["replaced"] == "9 of 9"
    assert relative_difference(found["ours"], found["stock"]) <= TOLERANCE


def _requests(packs) -> int:
    """Returns how many requests the ranks have finished."""
    return sum(line["event"] == "ended" for line in packs.logged())


def test_calls_of_the_model_outside_of_samplers_are_made_by_the_devices(packs):
    """A LoRA is included because ComfyUI merges it into the weights while it loads a model."""
    lora = write_loras(packs.models("loras"))["kohya"]
    graph = AnyGraph(packs, "flux")
    source = graph.stock()
    positive, _, latent = graph.request()

    def sampled(model: list) -> list:
        return [graph.add("TestDirectCalls", model=model, positive=positive, latent=latent), 0]

    ways = {
        "without": sampled(source),
        "stock": sampled(graph.lora(source, lora)),
        "before": sampled([graph.parallel(graph.lora(source, lora), ulysses=2), 0]),
        "behind": sampled(graph.lora([graph.parallel(source, ulysses=2), 0], lora)),
    }
    earlier = _requests(packs)
    compared(packs, graph, ways, TOLERANCE)
    assert _requests(packs) >= earlier + 2 * 3  # one more if the ranks had to request weights


def test_the_first_use_of_a_pack_says_that_the_devices_import_it(packs):
    """The message appears once per start of the ranks."""
    packs.stop_ranks()
    graph = AnyGraph(packs, "flux")
    model = graph.add("TestRoutes", model=[graph.parallel(graph.stock(), ulysses=2), 0])
    said = []
    for seed in (1, 2):
        with packs.client.listen() as events:
            latents(packs, graph, {"found": graph.ksampler([model, 0], *graph.request(), steps=2, seed=seed)})
        said.append("importing parallel_test_routes, once" in str(events.messages))
    assert said == [True, False]


def test_patches_that_are_in_the_weights_already_are_not_put_there_again(packs):
    lora = write_loras(packs.models("loras"))["kohya"]
    counted = packs.output("counted.txt")
    counted.touch()

    def calls(seed: int, strength: float, on: bool = True) -> int:
        graph = AnyGraph(packs, "flux")
        model = [graph.parallel(graph.stock(), ulysses=2), 0]
        model = [graph.add("TestCountedPatching", model=model, on=on), 0]
        model = graph.lora(model, lora, strength)
        before = len(counted.read_text().splitlines())
        latents(packs, graph, {"found": graph.ksampler(model, *graph.request(), steps=2, cfg=1.0, seed=seed)})
        return len(counted.read_text().splitlines()) - before

    first = calls(1, 0.8)
    assert first and not first % 2, "in both processes"
    assert calls(2, 0.8) == 0
    assert calls(2, 0.5) == first
    assert calls(3, 0.5, on=False) == 0


@pytest.fixture
def impatient(packs):
    """Yields the ComfyUI of `packs`, which gives up on silent ranks after PATIENCE and may restart ranks at once."""

    def wait(seconds: float) -> None:
        graph = Graph()
        graph.add("TestPatience", seconds=seconds)
        packs.run(graph.prompt)
        packs.allow_restarts()

    wait(PATIENCE)
    yield packs
    wait(0.0)


def _run(packs, name: str | None, *, parallel: bool = True, **inputs):
    """Samples a tiny Flux behind the node `name`, or without one if it is None, and returns the latent."""
    graph = AnyGraph(packs, "flux")
    model = graph.stock()
    if parallel:
        model = [graph.parallel(model, ulysses=2), 0]
    if name is not None:
        model = [graph.add(name, model=model, **inputs), 0]
    sampled = graph.ksampler(model, *graph.request(), steps=6, cfg=1.0)
    return latents(packs, graph, {"found": sampled})["found"]


def _works_again(packs) -> None:
    packs.allow_restarts()
    expected = _run(packs, None, parallel=False)
    assert relative_difference(_run(packs, None), expected) <= TOLERANCE


@pytest.mark.parametrize(
    ("node", "pack", "words"),
    [
        ("TestRaises", "parallel_test_raises", "no such kernel for this device"),
        ("TestBreaks", "parallel_test_breaks", "it needs a library that is not installed"),
        ("TestHangs", "parallel_test_hangs", "process 1"),
        ("TestEnds", "parallel_test_ends", "process 1"),
    ],
)
def test_a_pack_that_fails_in_one_rank_is_named_and_the_next_prompt_works(impatient, node, pack, words):
    with pytest.raises(PromptFailed) as failure:
        _run(impatient, node)
    _works_again(impatient)
    assert words in str(failure.value) and pack in str(failure.value)


@pytest.mark.parametrize("place", ["before", "behind", "a guider"])
def test_what_cannot_be_sent_is_refused_with_the_title_of_the_node_that_put_it_there(packs, place):
    """If the bad node patches the model, another patching node precedes it: the error must name only the bad one."""
    graph = AnyGraph(packs, "flux")
    source, request = graph.stock(), graph.request()
    if place == "a guider":
        positive, negative, latent = request
        parallel = [graph.parallel(source, ulysses=2), 0]
        bad = graph.add("TestLockedGuider", model=parallel, positive=positive, negative=negative, cfg=2.0)
        sampled = [graph.custom_sampler(parallel, bad, "euler", latent), 0]
    else:
        model = source if place == "before" else [graph.parallel(source, ulysses=2), 0]
        model = [graph.add("TestBlockClosure", model=model, blocks="single_blocks", weight=0.5), 0]
        bad = graph.add("TestLocks", model=model)
        model = [bad, 0] if place == "behind" else [graph.parallel([bad, 0], ulysses=2), 0]
        sampled = graph.ksampler(model, *request, steps=2, cfg=1.0)
    graph.prompt[bad]["_meta"] = {"title": "My accelerator"}
    with pytest.raises(PromptFailed) as failure:
        latents(packs, graph, {"found": sampled})
    text = str(failure.value)
    assert f'what "My accelerator" (#{bad}) has put into this job' in text
    assert "cannot pickle '_thread.lock' object" in text and "Take that node out" in text


def test_ranks_that_differ_by_one_bit_at_a_caches_limit_give_the_same_picture_or_an_error(impatient):
    """The first rank skips a step that the second computes: neither may wait for the other forever."""
    cache = {"limit": 0.0, "on_the_edge": True}
    expected = _run(impatient, "TestStepCache", parallel=False, **cache)
    assert relative_difference(_run(impatient, None, parallel=False), expected) > TELLING
    try:
        found = _run(impatient, "TestStepCache", **cache)
    except PromptFailed as failure:
        assert "rank" in str(failure)
    else:
        assert relative_difference(found, expected) <= TOLERANCE
    _works_again(impatient)
