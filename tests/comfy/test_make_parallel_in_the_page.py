"""In a real browser, one click puts Parallel Model behind every loader of a workflow, also inside subgraphs. One undo
or another click takes it out again and restores all links and values."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file

from differences import relative_difference
from gguf_files import write
from graphs import STOCK, Graph
from pages import (
    LINKS,
    OVERLAPS,
    SEND,
    begin,
    command,
    make_subgraph,
    menu_of,
    show_prompt,
    three_samplers,
    toast,
    wait_for,
    words_of,
)

UNET = "tiny_made.safetensors"
MODELS = {UNET: 2}
VALUES = """() => app.graph.nodes.filter(n => n.type !== 'ParallelModel').map(
  n => [n.id, n.type, n.widgets?.map(w => w.value), [...n.pos], [...n.size]])"""
COUNT = "() => app.graph.nodes.filter(n => n.type === 'ParallelModel').length"
# Until it is called again, what waits for some time waits for a twentieth of it.
HURRY = """() => {
  const { setTimeout } = window;
  window.setTimeout = window.usualTimeout ?? ((act, ms, ...rest) => setTimeout(act, ms / 20, ...rest));
  window.usualTimeout = window.usualTimeout ? undefined : setTimeout;
}"""
MENU = """() => app.canvas.getCanvasMenuOptions().map(item => item?.content).filter(Boolean)"""


def _links(page) -> list[list[list[str]]]:
    """Returns [source class, target class, input name] of each link, for each graph and subgraph."""
    return [[[source, target, name] for source, _, target, name in graph] for graph in page.evaluate(LINKS)]


def test_every_loader_gets_one_values_and_links_stay_and_one_undo_takes_it_back(page):
    """tests/comfy/test_official_graphs.py compares the latents."""
    show_prompt(page, three_samplers(UNET, "made").prompt)
    links, values = _links(page), page.evaluate(VALUES)
    words = words_of()
    assert words["make_parallel"] in page.evaluate(MENU) and words["make_stock"] not in page.evaluate(MENU)
    assert words["make_parallel"] in menu_of(page, "UNETLoader")
    assert words["make_parallel"] not in menu_of(page, "KSampler")

    command(page, "parallel_sampling.make_parallel")
    told = toast(page, words["made_parallel"].replace("{count}", "2").replace("{where}", ""))
    told.wait_for()
    (made,) = _links(page)
    assert page.evaluate(COUNT) == 2 and page.evaluate(VALUES) == values and page.evaluate(OVERLAPS) == []
    assert made.count(["UNETLoader", "ParallelModel", "model"]) == 2
    assert made.count(["ParallelModel", "KSampler", "model"]) == 2
    assert made.count(["ParallelModel", "ModelSamplingFlux", "model"]) == 1
    assert not any(a == "UNETLoader" and b != "ParallelModel" for a, b, _ in made)
    assert len(made) == len(links[0]) + 2
    assert words["make_parallel"] not in page.evaluate(MENU)
    assert words["make_stock"] in menu_of(page, "ParallelModel")

    page.evaluate(HURRY)
    command(page, "parallel_sampling.swap_out")  # its message goes by itself
    other = toast(page, words["nothing_to_swap_back"])
    other.wait_for()
    other.wait_for(state="detached")
    page.evaluate(HURRY)
    assert told.is_visible()
    command(page, "Comfy.Undo")
    told.wait_for(state="detached")
    wait_for(page, COUNT, 0)
    assert _links(page) == links and page.evaluate(VALUES) == values
    command(page, "Comfy.Redo")
    wait_for(page, COUNT, 2)
    assert _links(page) == [made]

    command(page, "parallel_sampling.make_stock")
    wait_for(page, COUNT, 0)
    assert _links(page) == links and page.evaluate(VALUES) == values


def test_text_encoders_and_vaes_get_theirs_where_the_settings_say_so_and_give_what_stock_gives(
    page, measuring, set_setting
):
    graph = Graph()
    clip = [graph.add("TestEncoder", kind="clip_l", clip_name="made.safetensors", draw=0, scale=1), 0]
    skipped = [graph.add("CLIPSetLastLayer", clip=clip, stop_at_clip_layer=-2), 0]
    for number, one in enumerate((clip, skipped)):
        text = [graph.add("CLIPTextEncode", clip=one, text="a red cat"), 0]
        graph.save(text, f"made-text-{number}.safetensors")
    vae = [graph.add("TestImageVAE"), 0]
    pixels = [graph.add("TestImage", width=40, height=48, batch=1, channels=3), 0]
    latent = [graph.add("VAEEncode", pixels=pixels, vae=vae), 0]
    image = [graph.add("VAEDecode", samples=latent, vae=vae), 0]
    graph.save(image, "made-image.safetensors")
    paths = [measuring.output(f"made-text-{number}.safetensors") for number in range(2)]
    paths.append(measuring.output("made-image.safetensors"))
    measuring.run(graph.prompt)
    stock = [load_file(path) for path in paths]
    show_prompt(page, graph.prompt)
    links = _links(page)
    assert words_of()["make_parallel"] not in page.evaluate(MENU)
    set_setting("parallel_sampling.make_encoders_parallel", True)
    assert words_of()["make_parallel"] in menu_of(page, "TestEncoder")
    command(page, "parallel_sampling.make_parallel")
    (made,) = _links(page)
    assert made.count(["TestEncoder", "ParallelCLIP", "clip"]) == 1
    assert made.count(["ParallelCLIP", "CLIPTextEncode", "clip"]) == 1
    assert made.count(["ParallelCLIP", "CLIPSetLastLayer", "clip"]) == 1
    assert made.count(["ParallelVAEEncode", "ParallelVAEDecode", "samples"]) == 1
    assert made.count(["TestImageVAE", "ParallelVAEDecode", "vae"]) == 1
    assert made.count(["ParallelVAEDecode", "TestSave", "value"]) == 1
    assert len(made) == len(links[0]) + 1
    for path in paths:
        path.unlink()
    measuring.run(page.evaluate(SEND))
    for path, expected in zip(paths, stock, strict=True):
        found, tolerance = load_file(path), 1e-5 * (path.name == "made-image.safetensors")
        for name, one in expected.items():
            assert (found[name] - one).abs().max() <= tolerance * one.abs().max()
    command(page, "parallel_sampling.make_stock")
    assert _links(page) == links


def test_a_loader_of_gguf_files_is_exchanged_for_ours_which_gives_its_latent(page, measuring):
    folder = measuring.models()
    write(folder / "made.gguf", "Q8_0", tensors=load_file(folder / UNET))
    page.evaluate("() => app.refreshComboInNodes()")  # as the key R, after a file was added
    graph = Graph()
    model = [graph.add("UnetLoaderGGUF", unet_name="made.gguf", virtual_vram=7), 0]
    shifted = [graph.add("ModelSamplingAuraFlow", model=model, shift=2.0), 0]
    latent = graph.ksampler(shifted, *graph.request(), steps=2)
    graph.save(latent, "gguf.safetensors")
    measuring.run(graph.prompt)
    stock = measuring.tensor("gguf.safetensors")
    show_prompt(page, graph.prompt)
    links, sent = _links(page), page.evaluate(SEND)
    command(page, "parallel_sampling.make_parallel")
    (made,) = _links(page)
    assert made == sorted([a.replace("UnetLoaderGGUF", "ParallelModelLoader"), b, n] for a, b, n in links[0])
    measuring.output("gguf.safetensors").unlink()
    measuring.run(page.evaluate(SEND))
    ours = measuring.tensor("gguf.safetensors")
    assert relative_difference(ours, stock) <= 3e-3  # the pack's weights unpack to float16
    assert words_of()["make_stock"] in page.evaluate(MENU)
    command(page, "parallel_sampling.make_stock")
    assert _links(page) == links and page.evaluate(SEND) == sent


def _coders() -> Graph:
    """Returns a graph that samples a model, encodes a text and decodes a picture."""
    graph = Graph()
    clip = [graph.add("TestEncoder", kind="clip_l", clip_name="made.safetensors", draw=0, scale=1), 0]
    text = [graph.add("CLIPTextEncode", clip=clip, text="a red cat"), 0]
    graph.save(text, "offered-text.safetensors")
    latent = [graph.add("TestShapedLatent", shape="1,16,8,8", draw=1), 0]
    image = [graph.add("VAEDecode", samples=latent, vae=[graph.add("TestTinyVAE"), 0]), 0]
    graph.save(image, "offered-image.safetensors")
    model = graph.ksampler(graph.model(STOCK, UNET), *graph.request())
    graph.save(model, "offered.safetensors")
    return graph


SETTING = "() => app.extensionManager.setting.get('parallel_sampling.make_encoders_parallel')"
OFFER = "dialog.parallel-doctor"
# Answers that replace ComfyUI's own and describe a machine with a GPU and large files. Sizes in bytes.
LARGE = {
    "**/system_stats": {"devices": [{"type": "cuda", "vram_total": 16 * 2**30}]},
    "**/experiment/models/text_encoders": [{"name": "made.safetensors", "size": 9 * 2**30}],
    "**/experiment/models/diffusion_models": [{"name": UNET, "size": 12 * 2**30}],
}


def _enlarge(page) -> None:
    for address, answer in LARGE.items():
        page.route(address, lambda route, _, answer=answer: route.fulfill(json=answer))


@pytest.mark.parametrize("reason", ["time", "memory"])
def test_a_dialog_offers_text_encoders_and_vaes_where_they_are_worth_it(page, set_setting, reason):
    set_setting("parallel_sampling.make_encoders_parallel", False)  # for its reset: the dialog sets it
    show_prompt(page, _coders().prompt)
    links = _links(page)
    if reason == "memory":
        _enlarge(page)
        sizes = {"encoder": "9.0", "model": "12.0", "device": "16.0"}
        expected = words_of()["too_by_memory"].format(**sizes)
    else:
        # Sends ComfyUI's events of a prompt whose text takes two fifths of the time.
        page.evaluate(
            """async () => {
              const { api } = await import('/scripts/api.js');
              const id = kind => String(app.graph.nodes.find(n => n.type === kind).id);
              const wait = ms => new Promise(done => setTimeout(done, ms));
              api.dispatchCustomEvent('execution_start', { prompt_id: 'one' });
              for (const [kind, ms] of [['CLIPTextEncode', 200], ['KSampler', 300]]) {
                api.dispatchCustomEvent('executing', id(kind));
                await wait(ms);
              }
              api.dispatchCustomEvent('executing', null);
            }"""
        )
        expected = words_of()["too_by_time"].partition("{share}")[0]
    begin(page, "make_parallel")
    dialog = page.locator(OFFER)
    dialog.get_by_text(expected).wait_for()
    dialog.get_by_role("button", name="Close").click()  # changes nothing, and offers it again
    assert _links(page) == links and page.evaluate(SETTING) is False
    begin(page, "make_parallel")
    dialog.get_by_role("button", name=words_of()["too_go"]).click()
    page.wait_for_function("() => app.graph.nodes.some(n => n.type === 'ParallelVAEDecode')")
    (made,) = _links(page)
    assert ["ParallelCLIP", "CLIPTextEncode", "clip"] in made
    assert ["UNETLoader", "ParallelModel", "model"] in made
    assert page.evaluate(SETTING) is True

    if reason == "time":  # the time is that of one workflow, and says nothing of another
        set_setting("parallel_sampling.make_encoders_parallel", False)
        show_prompt(page, _coders().prompt)
        begin(page, "make_parallel")
        wait_for(page, COUNT, 1)
        assert dialog.count() == 0


def test_who_wants_the_model_alone_is_not_asked_again(page):
    _enlarge(page)
    for asked in (True, False):
        show_prompt(page, _coders().prompt)
        begin(page, "make_parallel")
        if asked:
            page.locator(OFFER).get_by_role("checkbox").uncheck()
            page.locator(OFFER).get_by_role("button", name=words_of()["too_go"]).click()
        page.wait_for_function("() => app.graph.nodes.some(n => n.type === 'ParallelModel')")
        assert page.locator(OFFER).count() == 0
        (made,) = _links(page)
        assert ["TestEncoder", "CLIPTextEncode", "clip"] in made and page.evaluate(SETTING) is False


def test_loaders_inside_subgraphs_too_and_what_is_parallel_already_is_left_alone(page):
    graph = three_samplers(UNET, "made")
    parallel = [graph.add("ParallelModel", model=graph.model(STOCK, UNET)), 0]
    graph.save(graph.ksampler(parallel, *graph.request()), "kept.safetensors")
    show_prompt(page, graph.prompt)
    # Of the loaders with one link, the one that feeds a sampler.
    fed = "app.graph.nodes.filter(n => n.type === 'KSampler').map(n => n.getInputNode(0))"
    make_subgraph(page, f"{fed}.filter(n => n.type === 'UNETLoader' && n.outputs[0].links.length === 1)")
    outer, inner = _links(page)
    assert inner == [["UNETLoader", "outside", ""]]
    holder = page.evaluate("() => app.graph.nodes.find(n => n.subgraph).title")
    command(page, "parallel_sampling.make_parallel")
    where = words_of()["inside"].replace("{names}", holder)
    said = words_of()["made_parallel"].replace("{count}", "2").replace("{where}", where)
    toast(page, said).wait_for()
    made, inside = _links(page)
    assert inside == [["ParallelModel", "outside", ""], ["UNETLoader", "ParallelModel", "model"]]
    assert made.count(["UNETLoader", "ParallelModel", "model"]) == 2  # the earlier one and a new one
    assert page.evaluate(COUNT) == 2
    assert not any(a == b == "ParallelModel" for a, b, _ in made)
    prompt = page.evaluate(SEND)
    for node in prompt.values():
        if node["class_type"] == "KSampler":
            origin = prompt[node["inputs"]["model"][0]]
            before = prompt[origin["inputs"]["model"][0]]
            assert "ParallelModel" in (origin["class_type"], before["class_type"])
    command(page, "Comfy.Undo")
    wait_for(page, COUNT, 1)
    assert _links(page) == [outer, inner]


def test_a_parallel_model_that_parallel_sampler_needs_stays_and_that_is_said(page):
    graph = Graph()
    loader = graph.add("ParallelModel", model=graph.model(STOCK, UNET))
    inputs = graph.request()
    graph.prompt[graph.parallel_sampler(loader, *inputs)[0]]["inputs"]["parallel_model"] = [loader, 1]
    show_prompt(page, graph.prompt)
    assert words_of()["make_stock"] not in page.evaluate(MENU)
    command(page, "parallel_sampling.make_stock")
    toast(page, words_of()["stays"].replace("{count}", "1")).wait_for()
    assert page.evaluate(COUNT) == 1


def test_the_menu_that_a_right_click_opens_has_it(page, drawn_by):
    show_prompt(page, three_samplers(UNET, "made").prompt, "UNETLoader")
    page.evaluate("() => app.canvas.draw(true, true)")
    page.mouse.click(460, 85, button="right")  # on the node's title
    item = page.get_by_text(words_of()["make_parallel"], exact=True)
    extensions = page.get_by_text("Extensions", exact=True)
    item.or_(extensions).first.wait_for()
    if not item.first.is_visible():
        extensions.first.hover()
    item.first.click()
    wait_for(page, COUNT, 2)
