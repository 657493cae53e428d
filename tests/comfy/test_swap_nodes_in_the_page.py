"""In a real browser, a command replaces KSampler and its loader by ours. Links and values stay, nothing overlaps, and
one undo or the reverse command restores the workflow."""

from __future__ import annotations

from graphs import STOCK, Graph
from pages import (
    LINKS,
    OVERLAPS,
    SEND,
    command,
    make_subgraph,
    menu_of,
    one_sampler,
    show_prompt,
    three_samplers,
    toast,
    wait_for,
    words_of,
)

UNET = "tiny_swapped.safetensors"
MODELS = {UNET: 2}
VALUES = """() => app.graph.nodes.map(n => [String(n.id), n.type, n.title,
  Object.fromEntries((n.widgets ?? []).filter(w => w.serialize !== false).map(w => [w.name, w.value]))]).sort()"""
KINDS = "() => app.graph.nodes.map(n => n.type).sort()"
WORDS = words_of()


def test_values_links_and_latents_stay_and_undo_or_the_way_back_gives_what_was(page, measuring):
    graph = three_samplers(UNET, "swapped", steps=2, sampler_name="heun", denoise=0.9)
    samplers = [name for name, node in graph.prompt.items() if node["class_type"] == "KSampler"]
    stock = [measuring.sample(graph.prompt, [name, 0]) for name in samplers]
    show_prompt(page, graph.prompt, "KSampler")
    page.evaluate("() => { app.graph.nodes.find(n => n.type === 'KSampler').title = 'Mine'; }")
    page.evaluate("() => app.extensionManager.workflow.activeWorkflow.changeTracker.captureCanvasState?.()")
    assert page.evaluate(OVERLAPS) == []
    links, values, kinds = (page.evaluate(what) for what in (LINKS, VALUES, KINDS))
    assert WORDS["swap"] in menu_of(page, "KSampler") and WORDS["swap"] in menu_of(page, "UNETLoader")

    command(page, "parallel_sampling.swap_in")
    toast(page, WORDS["swapped"].replace("{count}", "3")).wait_for()
    (made,) = page.evaluate(LINKS)
    names = {"UNETLoader": "ParallelModelLoader", "KSampler": "ParallelSampler"}
    samplers_only = {"KSampler": "ParallelSampler"}
    after = [samplers_only.get(kind, kind) for kind in kinds if kind != "UNETLoader"]
    both = ["UNETLoader", "ParallelModelLoader", "ParallelModel", "ParallelModel"]
    swapped = sorted([*after, *both])
    assert page.evaluate(KINDS) == swapped
    assert made.count(["ParallelModelLoader", 1, "ParallelSampler", "parallel_model"]) == 1
    assert made.count(["UNETLoader", 0, "ParallelModel", "model"]) == 1
    assert made.count(["UNETLoader", 0, "ModelSamplingFlux", "model"]) == 1
    assert made.count(["ModelSamplingFlux", 0, "ParallelModel", "model"]) == 1
    assert made.count(["ParallelModel", 1, "ParallelSampler", "parallel_model"]) == 2
    others = [link for link in links[0] if link[3] != "model"]
    assert [link for link in made if "odel" not in link[3]] == sorted(
        [names.get(a, a), slot, names.get(b, b), name] for a, slot, b, name in others
    )
    after = {node: (title, shown) for node, _, title, shown in page.evaluate(VALUES)}
    for node, kind, title, shown in values:
        renamed = {{"unet_name": "model_name"}.get(name, name): value for name, value in shown.items()}
        assert any(one.items() <= after[node][1].items() for one in (shown, renamed)), kind
        assert title != "Mine" or after[node][0] == "Mine"
    assert page.evaluate(OVERLAPS) == []
    assert WORDS["swap"] not in menu_of(page, "ParallelSampler")
    assert WORDS["swap_back"] in menu_of(page, "ParallelSampler")

    prompt = page.evaluate(SEND)
    latents = {node["inputs"]["seed"]: name for name, node in prompt.items() if "seed" in node["inputs"]}
    for name, expected in zip(samplers, stock, strict=True):
        found = measuring.sample(prompt, [latents[graph.prompt[name]["inputs"]["seed"]], 0])
        assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()

    command(page, "Comfy.Undo")
    wait_for(page, KINDS, kinds)
    assert page.evaluate(LINKS) == links and page.evaluate(VALUES) == values
    command(page, "Comfy.Redo")
    wait_for(page, KINDS, swapped)

    command(page, "parallel_sampling.swap_out")
    toast(page, WORDS["swapped_back"].replace("{count}", "3")).wait_for()
    assert page.evaluate(KINDS) == kinds and page.evaluate(LINKS) == links and page.evaluate(VALUES) == values
    assert page.evaluate(OVERLAPS) == []


def test_a_loader_whose_model_leaves_its_subgraph_stays(page):
    show_prompt(page, three_samplers(UNET, "swapped").prompt)
    loader = "app.graph.nodes.find(n => n.type === 'UNETLoader' && n.outputs[0].links.length === 2)"
    sampler = f"app.graph.nodes.find(n => n.type === 'KSampler' && n.getInputNode(0) === {loader})"
    make_subgraph(page, f"[{loader}, {sampler}]")
    before = page.evaluate(LINKS)
    command(page, "parallel_sampling.swap_in")
    _, inner = page.evaluate(LINKS)
    assert ["UNETLoader", 0, "ParallelModel", "model"] in inner and ["UNETLoader", 0, "outside", ""] in inner
    assert ["ParallelModel", 1, "ParallelSampler", "parallel_model"] in inner
    command(page, "parallel_sampling.swap_out")
    assert page.evaluate(LINKS) == before


def test_inside_a_subgraph_too_and_what_cannot_be_swapped_is_said(page):
    graph = Graph()
    latent = graph.ksampler(graph.model(STOCK, UNET), *graph.request())
    graph.save(latent, "swapped.safetensors")
    show_prompt(page, graph.prompt, "KSampler")
    make_subgraph(page, "app.graph.nodes.filter(n => ['UNETLoader', 'KSampler'].includes(n.type))")
    before = page.evaluate(LINKS)
    command(page, "parallel_sampling.swap_in")
    outer, inner = page.evaluate(LINKS)
    assert outer == before[0]
    assert ["ParallelModelLoader", 1, "ParallelSampler", "parallel_model"] in inner
    outside = {name for a, _, b, name in before[1] if (a, b) == ("outside", "KSampler")}
    assert outside > {"positive", "negative", "latent_image"}  # and the widgets that the subgraph exposes
    assert {name for a, _, b, name in inner if (a, b) == ("outside", "ParallelSampler")} == outside
    assert ["ParallelSampler", 0, "outside", ""] in inner
    command(page, "parallel_sampling.swap_out")
    assert page.evaluate(LINKS) == before

    show_prompt(page, one_sampler(UNET).prompt, "ParallelSampler")
    for name, words in (("swap_in", "nothing_to_swap"), ("swap_out", "nothing_to_swap_back")):
        command(page, f"parallel_sampling.{name}")
        toast(page, WORDS[words]).wait_for()
