"""In a real browser, one click runs a sampler's job on one device and on all devices and shows both pictures. The node
Compare With One Device shows them on itself. A stock sampler behind Parallel Model can be proved too."""

from __future__ import annotations

import re

from graphs import STOCK, Graph
from pack_nodes import import_node_module
from pages import (
    REPORT,
    WRITTEN,
    bring_into_view,
    choose,
    ended,
    menu_of,
    run,
    set_widgets,
    show_again,
    show_prompt,
    toast,
    wait_for_badge,
    wait_for_report,
    widgets,
    words_of,
)
from waiting import wait_until

UNET = "tiny_proved.safetensors"
BADGED, STOCKS = "tiny_badge.safetensors", "tiny_stock_sampler.safetensors"  # each measured separately
MODELS = {UNET: 5, BADGED: 6, STOCKS: 3}
# Says if both pictures are there.
BOTH = """(inside) => {
  const pictures = [...document.querySelectorAll(`${inside} .parallel-comparison img`)];
  return pictures.length === 2 && pictures.every(one => one.complete && one.naturalWidth);
}"""
# Lists [title, time] of each bar.
TIMES = """() => {
  const cells = [...document.querySelectorAll('dialog .times > span')].map(cell => cell.innerText);
  return [cells.slice(0, 2), cells.slice(2)];
}"""
BLENDED = """() => [getComputedStyle(document.querySelector('dialog img + img')).mixBlendMode,
  getComputedStyle(document.querySelector('dialog .both')).filter]"""
PARTS = """() => Object.fromEntries(['h2', '.pictures', 'figcaption', '.times', '.buttons'].map(
  part => [part, document.querySelector(`dialog ${part}`).getBoundingClientRect().toJSON()]))"""
SIZES = """() => ['.pictures', 'figcaption', '.parallel-run'].map(
  c => document.querySelector(`.parallel-run ${c}, ${c}.parallel-run`).getBoundingClientRect().toJSON())"""
EDGE = "(inside) => getComputedStyle(document.querySelector(`${inside} img + img`)).clipPath"


def _graph(decoded: bool = True, unet: str = UNET) -> Graph:
    graph = Graph()
    loader = graph.parallel_loader(unet, "cpu:2", ulysses=2)
    latent = graph.parallel_sampler(loader, *graph.request())
    if decoded:
        image = [graph.add("VAEDecode", samples=latent, vae=[graph.add("TestTinyVAE"), 0]), 0]
        graph.add("PreviewImage", images=image)
    else:
        graph.save(latent, "proved.safetensors")
    return graph


def _show(page, prompt: dict, kind: str = "ParallelSampler") -> None:
    """Loads the prompt as a workflow with a new id and scrolls to the node of class `kind`."""
    show_prompt(page, prompt, kind)
    page.wait_for_selector(".parallel-report")


def _seeds(comfy, kind: str) -> list[int]:
    """Returns the seeds of the nodes of this kind in ComfyUI's history."""
    nodes = [node for prompt in ended(comfy) for node in prompt.values()]
    return [node["inputs"]["seed"] for node in nodes if node["class_type"] == kind]


def _run(page, comfy, seed: int) -> None:
    """Runs the workflow with a seed, which the run raises by one for the next, and waits until the history has it."""
    set_widgets(page, "ParallelSampler", seed=seed, control_after_generate="increment")
    run(page)
    wait_for_report(page, "strategy: ")
    wait_until(lambda: seed in _seeds(comfy, "ParallelSampler"))


def _prove(page):
    """Clicks Prove it and returns the dialog with the result."""
    page.get_by_role("button", name=words_of()["prove"]).click()
    dialog = page.get_by_role("dialog", name=words_of()["proof"].format(count=2))
    dialog.wait_for()
    return dialog


def _shows_all_that_counts(page, height: int) -> None:
    """Asserts that the window shows the title, both pictures, the facts and Close, without overlap."""
    parts = page.evaluate(PARTS)
    assert all(part["top"] >= 0 and part["bottom"] <= height for part in parts.values()), parts
    assert 100 < parts[".pictures"]["height"] <= 0.6 * height
    assert parts["figcaption"]["bottom"] <= parts[".buttons"]["top"]


def test_one_click_proves_the_run_that_is_shown_with_its_seed_and_then_the_badge_says_what_it_won(
    page, measuring
):
    """A test below has the badges that Vue draws."""
    seed, costs = 200, r"2 devices \(Ulysses\) · [\d.e-]+ s per step · "
    _show(page, _graph(unet=BADGED).prompt)
    _run(page, measuring, seed)
    assert widgets(page, "ParallelSampler")["seed"] == seed + 1  # the next run's
    wait_for_badge(page, f"{costs}not compared")

    dialog = _prove(page)
    assert _seeds(measuring, "CompareWithOneDevice").count(seed) == 1
    assert widgets(page, "ParallelSampler")["seed"] == seed + 1
    page.wait_for_function(BOTH, arg="dialog")
    words = dialog.inner_text()
    assert words.startswith("Same picture on 2 devices?") and words_of()["same_picture"] in words
    times = page.evaluate(TIMES)
    assert [title for title, _ in times] == ["one device", "Ulysses 2"]
    one, split = (float(time.removesuffix(" s per step")) for _, time in times)
    compared = import_node_module("nodes.runs.report").compare_with_one_device(split, one)
    assert compared in words and "exact" in words
    for width, height in ((1366, 768), (1920, 1000), (1920, 1080)):
        page.set_viewport_size({"width": width, "height": height})
        _shows_all_that_counts(page, height)

    slider = dialog.get_by_role("slider")
    before = page.evaluate(EDGE, "dialog")
    box = slider.bounding_box()
    page.mouse.click(box["x"] + box["width"] * 0.9, box["y"] + box["height"] / 2)
    assert before == "inset(0px 0px 0px 50%)" and int(slider.input_value()) > 80
    assert page.evaluate(EDGE, "dialog") == f"inset(0px 0px 0px {slider.input_value()}%)"
    dialog.get_by_role("button", name=words_of()["show_difference"]).click()
    assert page.evaluate(BLENDED) == ["difference", "brightness(10)"] and not slider.is_visible()
    dialog.get_by_role("button", name=words_of()["show_pictures"]).click()
    assert page.evaluate(BLENDED) == ["normal", "none"] and slider.is_visible()
    page.keyboard.press("Escape")
    dialog.wait_for(state="detached")
    assert page.evaluate(REPORT).startswith("one device: 3 steps in ")  # the node's latest run
    assert page.evaluate("() => document.querySelector('.parallel-headline').textContent").endswith(" of 255")
    wait_for_badge(page, f"{costs}.* one device")

    # From now on every run shows the comparison; a failed run shows nothing.
    set_widgets(page, "TestLatent", channels=5, draw=1)
    run(page)
    wait_for_badge(page, "s per step", shown=False)
    set_widgets(page, "TestLatent", channels=16, draw=-1)
    run(page)
    wait_for_badge(page, f"{costs}(.* one device|not compared)")


def test_a_run_whose_picture_is_not_there_yet_is_proved_with_its_seed(page, measuring):
    """ComfyUI's history gets a prompt when it ends, and the report appears before that."""
    _show(page, _graph().prompt)
    _run(page, measuring, 300)
    (entry,) = measuring.ask("/history?max_items=1", method="GET")[1].values()

    def still_running(route):
        queue = route.fetch().json()
        route.fulfill(json=queue | {"queue_running": [entry["prompt"], *queue["queue_running"]]})

    page.route("**/api/queue", still_running)
    page.route("**/api/history?max_items=*", lambda route: route.fulfill(json={}))
    _prove(page)
    page.unroute_all()
    assert _seeds(measuring, "CompareWithOneDevice").count(300) == 1
    assert widgets(page, "ParallelSampler")["seed"] == 301


def test_the_menu_of_the_node_proves_too_and_says_what_is_missing(page):
    _show(page, _graph(decoded=False).prompt)
    choose(page, "ParallelSampler", "Prove it")
    toast(page, words_of()["prove_no_vae"]).wait_for()


def test_the_node_that_compares_shows_both_pictures_on_itself_and_again_after_a_reload(page, set_setting):
    graph = _graph(decoded=False)
    (sampler,) = [node for node in graph.prompt.values() if node["class_type"] == "ParallelSampler"]
    sampler["class_type"] = "CompareWithOneDevice"
    sampler["inputs"] |= {"vae": [graph.add("TestTinyVAE"), 0], "seed": 303}
    prompt = {name: node for name, node in graph.prompt.items() if node["class_type"] != "TestSave"}
    _show(page, prompt, "CompareWithOneDevice")
    run(page)
    for drawn_by in ("canvas", "vue"):
        if drawn_by == "vue":
            set_setting("Comfy.VueNodes.Enabled", True)
            page.reload()
        page.wait_for_function(BOTH, arg=".parallel-run")
        bring_into_view(page, "CompareWithOneDevice")
        page.wait_for_function(f"() => ({SIZES})()[0].height > 80")
        _, caption, panel = page.evaluate(SIZES)
        assert caption["bottom"] <= panel["bottom"] + 1


def test_every_language_has_all_words_of_the_page_with_the_same_values_in_them():
    def values(words: dict) -> dict[str, list[str]]:
        return {
            name: sorted(part.split("}")[0] for part in text.split("{")[1:]) for name, text in words.items()
        }

    english = words_of()
    for language in ("es", "zh"):
        assert values(words_of(language)) == values(english)
        assert all(text != english[name] for name, text in words_of(language).items())


# The places of the badge that Vue draws, and of its node.
OVER = """() => Object.fromEntries(Object.entries({
  badge: document.querySelector('.parallel-badge'),
  node: document.querySelector('[data-node-id]:has(> .parallel-badge)'),
}).map(([name, e]) => [name, e.getBoundingClientRect().toJSON()]))"""
# Returns Strategy Selector's panel; the page of frontend 1.58 takes it out where its node is out of sight.
PANEL = """() => app.graph.nodes.find(n => n.comfyClass === 'StrategySelector').widgets.find(
  widget => widget.name === 'strategy_panel').element"""
COSTS = r"2 devices \(Ulysses\) · [\d.e-]+ s per step"


def _by_stock(kind: str) -> dict:
    """Returns a prompt with a stock sampler of class `kind` behind Parallel Model."""
    graph = Graph()
    strategy = graph.strategy("cpu:2", ulysses=2)
    model = [graph.add("ParallelModel", model=graph.model(STOCK, STOCKS), strategy=strategy), 0]
    if kind == "KSampler":
        latent = graph.ksampler(model, *graph.request(), cfg=3.0)
    else:
        guider = graph.add("BasicGuider", model=model, conditioning=graph.text(1))
        latent = [graph.custom_sampler(model, guider, "euler_ancestral", graph.latent()), 0]
    image = [graph.add("ParallelVAEDecode", samples=latent, vae=[graph.add("TestTinyVAE"), 0]), 0]
    graph.add("PreviewImage", images=image)
    return graph.prompt


def test_a_stock_sampler_wears_the_badge_tells_its_report_and_is_proved(page, drawn_by):
    kind = "KSampler" if drawn_by == "canvas" else "SamplerCustomAdvanced"
    show_prompt(page, _by_stock(kind), kind)
    by_vue = drawn_by == "vue"
    assert words_of()["prove"] in menu_of(page, kind)
    assert words_of()["open_report"] not in menu_of(page, kind)
    assert words_of()["prove"] not in menu_of(page, "ParallelModel")
    run(page)
    wait_for_badge(page, rf"{COSTS} · not compared", by_vue)
    page.wait_for_function(f"() => ({PANEL})().querySelector('.parallel-candidates tr[aria-current]')")
    page.wait_for_function("() => Object.values(app.nodeOutputs).some(({ images }) => images)")

    if by_vue:
        over = page.evaluate(OVER)
        assert over["badge"]["bottom"] <= over["node"]["top"]
        assert over["badge"]["right"] <= over["node"]["right"] + 1
        page.locator(".parallel-badge").click()
    else:
        x, y = next(place for text, *place in page.evaluate(WRITTEN) if " s per step" in text)
        page.mouse.click(x, y - 60)  # above the badge
        assert page.get_by_role("dialog").count() == 0
        page.mouse.click(x, y)
    report = page.get_by_role("dialog")
    report.wait_for()
    words = report.inner_text()
    assert "2 devices (Ulysses) · " in words and "result: exact" in words
    assert report.locator(".parallel-timeline .row").count() == 2
    assert report.locator(".parallel-timeline .row").first.locator("g").count() == 3
    # The picture was decoded after the sampler's end.
    phases = report.locator(".parallel-phases").inner_text()
    assert re.search(r"sampling [\d.]+ s \(\d+ %\)\s+decoding [\d.]+ s \(\d+ %\)", phases)
    assert report.locator(".parallel-phases rect").count() == len(re.findall(r" s \(", phases)) >= 2
    report.get_by_role("button", name="Close").click()
    choose(page, kind, words_of()["open_report"])
    report.get_by_role("button", name="Close").click()

    choose(page, kind, words_of()["prove"])
    proof = page.get_by_role("dialog", name=words_of()["proof"].format(count=2))
    proof.wait_for()
    words = proof.inner_text()
    assert words_of()["same_picture"] in words and " one device · exact" in words
    proof.get_by_role("button", name="Close").click()
    wait_for_badge(page, COSTS, by_vue)

    show_again(page)
    wait_for_badge(page, COSTS, by_vue)
    set_widgets(page, "TestLatent", batch_index="none")  # it fails, so the sampler never starts
    run(page)
    wait_for_badge(page, "s per step", by_vue, shown=False)
    wait_until(lambda: words_of()["open_report"] not in menu_of(page, kind))
