"""In a real browser, one click runs a sampler's job on one device and on all devices and shows both pictures. The node
Compare With One Device shows them on itself."""

from __future__ import annotations

from graphs import Graph
from pack_nodes import import_node_module
from pages import (
    BADGES,
    REPORT,
    TOAST,
    bring_into_view,
    choose,
    run,
    set_widget,
    shoot,
    show_prompt,
    toast,
    wait_for_report,
    words_of,
)
from waiting import wait_until

UNET = "tiny_proved.safetensors"
BADGED = "tiny_badge.safetensors"  # measured separately
MODELS = {UNET: 5, BADGED: 6}
SEED = "() => app.graph.nodes.find(n => n.comfyClass === 'ParallelSampler').widgets.find(w => w.name === 'seed').value"
COMPARED = """async () => {
  const history = Object.values(await (await app.api.fetchApi('/history')).json());
  return history.flatMap(({prompt}) => Object.values(prompt[2])).filter(
    n => n.class_type === 'CompareWithOneDevice').map(n => n.inputs.seed);
}"""
PICTURES = """(inside) => [...document.querySelectorAll(`${inside} .parallel-comparison img`)].map(
  i => i.complete && i.naturalWidth)"""
ENDED = """async (seed) => {
  const history = Object.values(await (await app.api.fetchApi('/history')).json());
  return history.map(({prompt}) => prompt).find(prompt => Object.values(prompt[2]).some(
    n => n.class_type === 'ParallelSampler' && n.inputs.seed === seed));
}"""
# The outcome of every prompt, for a failing test's message.
STATE = """async () => ({
  toasts: [...document.querySelectorAll('TOAST')].map(toast => toast.innerText),
  queue: (await (await fetch('/queue')).json()).queue_running.map(([, id]) => id),
  ends: Object.values(await (await fetch('/history')).json()).map(
    ({status}) => status.messages.map(([kind, {exception_message: why}]) => why ? [kind, why] : kind)),
})""".replace("TOAST", TOAST)
# Lists [title, time] of each bar.
TIMES = """() => {
  const cells = [...document.querySelectorAll('dialog .times > span')].map(cell => cell.innerText);
  return [cells.slice(0, 2), cells.slice(2)];
}"""
BLENDED = """() => [getComputedStyle(document.querySelector('dialog img + img')).mixBlendMode,
  getComputedStyle(document.querySelector('dialog .both')).filter]"""
PARTS = """() => Object.fromEntries(['h2', '.pictures', 'figcaption', '.times', '.buttons'].map(
  part => [part, document.querySelector(`dialog ${part}`).getBoundingClientRect().toJSON()]))"""
SHOWN = f"() => {{ const s = ({PICTURES})('.parallel-run'); return s.length === 2 && s.every(Boolean); }}"
SIZES = """() => ['.pictures', 'figcaption', '.parallel-run'].map(
  c => document.querySelector(`.parallel-run ${c}, ${c}.parallel-run`).getBoundingClientRect().toJSON())"""
EDGE = "(inside) => getComputedStyle(document.querySelector(`${inside} img + img`)).clipPath"


def _graph(decoded: bool = True, unet: str = UNET) -> Graph:
    graph = Graph()
    loader = graph.parallel_loader(unet, "cpu:2", ulysses=2)
    latent = graph.parallel_sampler(loader, graph.text(1), graph.text(2), graph.latent())
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


def _ended(page, seed: int) -> list:
    """Waits until ComfyUI's history has the run with this seed and returns its prompt. (page.wait_for_function cannot
    wait: it takes the promise of an async function for a true answer.)"""
    wait_until(lambda: page.evaluate(ENDED, seed), 120)
    return page.evaluate(ENDED, seed)


def _prove(page):
    """Clicks Prove it and returns the dialog with the result."""
    from playwright.sync_api import TimeoutError  # only installed together with the browser

    page.get_by_role("button", name=words_of()["prove"]).click()
    dialog = page.get_by_role("dialog", name=words_of()["proof"].format(count=2))
    try:
        dialog.wait_for()
    except TimeoutError as error:
        raise AssertionError(f"no dialog: {page.evaluate(STATE)}") from error
    return dialog


def _sentence(split: float, one: float) -> str:
    """Returns the sentence that compares the two times (seconds per step)."""
    return import_node_module("nodes.runs.speed").compare_with_one_device(split, one)


def _shows_all_that_counts(page, height: int) -> None:
    """Asserts that the window shows the title, both pictures, the facts and Close, without overlap."""
    parts = page.evaluate(PARTS)
    assert all(part["top"] >= 0 and part["bottom"] <= height for part in parts.values()), parts
    assert 100 < parts[".pictures"]["height"] <= 0.6 * height
    assert parts["figcaption"]["bottom"] <= parts[".buttons"]["top"]


def test_one_click_proves_the_run_that_is_shown_with_its_seed_and_then_the_badge_says_what_it_won(page):
    """tests/comfy/test_stock_sampler_in_the_page.py has the badges that Vue draws."""
    badge, seed = f"({BADGES})(false)", 200

    def wait_for_badge(words: str) -> None:
        said = rf"2 devices \(Ulysses\) · [\d.e-]+ s per step · {words}"
        page.wait_for_function(f"() => /{said}/.test({badge})")

    _show(page, _graph(unet=BADGED).prompt)
    set_widget(page, "ParallelSampler", "seed", seed)
    set_widget(page, "ParallelSampler", "control_after_generate", "increment")
    run(page)
    wait_for_report(page, "strategy: ")
    _ended(page, seed)
    assert page.evaluate(SEED) == seed + 1  # the next run's
    wait_for_badge("not compared")
    shoot(page, "badge")

    dialog = _prove(page)
    assert page.evaluate(COMPARED).count(seed) == 1 and page.evaluate(SEED) == seed + 1
    page.wait_for_function(
        f"() => {{ const s = ({PICTURES})('dialog'); return s.length === 2 && s.every(Boolean); }}"
    )
    words = dialog.inner_text()
    assert words.startswith("Same picture on 2 devices?") and words_of()["same_picture"] in words
    times = page.evaluate(TIMES)
    assert [title for title, _ in times] == ["one device", "Ulysses 2"]
    one, split = (float(time.removesuffix(" s per step")) for _, time in times)
    assert _sentence(split, one) in words and "exact" in words
    for width, height in ((1366, 768), (1920, 1000), (1920, 1080)):
        page.set_viewport_size({"width": width, "height": height})
        _shows_all_that_counts(page, height)
        shoot(page, f"prove_{width}")
    page.set_viewport_size({"width": 1280, "height": 900})

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
    wait_for_badge(".* one device")

    # From now on every run shows the comparison; a failed run shows nothing.
    for name, value in (("channels", 5), ("draw", 1)):
        set_widget(page, "TestLatent", name, value)
    run(page)
    page.wait_for_function(f"() => !/s per step/.test({badge})")
    for name, value in (("channels", 16), ("draw", -1)):
        set_widget(page, "TestLatent", name, value)
    run(page)
    wait_for_badge("(.* one device|not compared)")


def test_a_run_whose_picture_is_not_there_yet_is_proved_with_its_seed(page):
    """ComfyUI's history gets a prompt when it ends, and the report appears before that."""
    _show(page, _graph().prompt)
    set_widget(page, "ParallelSampler", "seed", 300)
    set_widget(page, "ParallelSampler", "control_after_generate", "increment")
    run(page)
    wait_for_report(page, "strategy: ")
    ended = _ended(page, 300)

    def still_running(route):
        queue = route.fetch().json()
        route.fulfill(json=queue | {"queue_running": [ended, *queue["queue_running"]]})

    page.route("**/api/queue", still_running)
    page.route("**/api/history?max_items=*", lambda route: route.fulfill(json={}))
    _prove(page)
    page.unroute_all()
    assert page.evaluate(COMPARED).count(300) == 1 and page.evaluate(SEED) == 301


def test_the_menu_of_the_node_proves_too_and_says_what_is_missing(page):
    _show(page, _graph(decoded=False).prompt)
    choose(page, "ParallelSampler", "Prove it")
    toast(page, words_of()["prove_no_vae"]).wait_for()


def test_the_node_that_compares_shows_both_pictures_on_itself_and_again_after_a_reload(page, set_setting):
    graph = _graph(decoded=False)
    (sampler,) = [node for node in graph.prompt.values() if node["class_type"] == "ParallelSampler"]
    sampler["class_type"] = "CompareWithOneDevice"
    sampler["inputs"] |= {"vae": [graph.add("TestTinyVAE"), 0], "seed": 303}
    graph.prompt = {
        name: node for name, node in graph.prompt.items() if node["class_type"] != "TestSaveLatent"
    }
    _show(page, graph.prompt, "CompareWithOneDevice")
    run(page)
    for drawn_by in ("canvas", "vue"):
        if drawn_by == "vue":
            set_setting("Comfy.VueNodes.Enabled", True)
            page.reload()
        page.wait_for_function(SHOWN)
        bring_into_view(page, "CompareWithOneDevice")
        page.wait_for_function(f"() => ({SIZES})()[0].height > 80")
        shoot(page, f"compared_{drawn_by}")
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
