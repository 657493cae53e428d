"""The picker of the input `devices` in a real browser: it lists devices and who uses them, and writes the input."""

from __future__ import annotations

from graphs import Graph
from pages import EIGHT_GPUS, command, open_picker, set_widgets, show_prompt, wait_for

UNET = "tiny_devices.safetensors"  # two attention heads
MODELS = {UNET: 1}
SELECTOR = "app.graph.nodes.find(n => n.comfyClass === 'StrategySelector')"
# Returns the input's text and the devices that are checked.
CHOSEN = f"""() => [{SELECTOR}.widgets.find(w => w.name === 'devices').value,
  ...[...document.querySelectorAll('.parallel-devices label')].filter(l => l.control.checked).map(
    l => l.querySelector('b').textContent)]"""
# Keeps the timer of the list in `again` instead of setting it.
KEEP_TIMER = """() => {
  const { setTimeout } = window;
  window.again = null;
  window.setTimeout = (act, ms, ...rest) => (ms === 2000 ? void (window.again = act) : setTimeout(act, ms, ...rest));
  window.keepNoTimer = () => { window.setTimeout = setTimeout; };
}"""
# Lets the kept timer come, and says if it is set once more.
GOES_ON = """async () => {
  const act = window.again;
  window.again = null;
  await act();
  return window.again !== null;
}"""


def _show(page, elsewhere: str = "") -> None:
    """Shows a selector of cpu:2, or of the devices that another node gives."""
    graph = Graph()
    loader = graph.parallel_loader(UNET, "cpu:2")
    if elsewhere:
        selector = graph.prompt[loader]["inputs"]["strategy"][0]
        graph.prompt[selector]["inputs"]["devices"] = [graph.add("PrimitiveString", value=elsewhere), 0]
    show_prompt(page, graph.prompt, "StrategySelector")
    page.evaluate(f"() => {{ {SELECTOR}.setSize([420, 700]); }}")


def test_a_machine_without_gpus_says_so_and_lists_its_cpu(page):
    _show(page)
    picker = open_picker(page)
    wait_for(page, CHOSEN, ["cpu:2", "cpu:0", "cpu:1"])
    words = picker.inner_text()
    assert "No usable GPU" in words and "GiB" in words and words.count("free ") >= 2
    # A typed text still counts, and the picker follows it.
    set_widgets(page, "StrategySelector", devices="cpu:4")
    wait_for(page, CHOSEN, ["cpu:4", *(f"cpu:{rank}" for rank in range(4))])
    picker.get_by_label("cpu:2").focus()
    page.keyboard.press("Space")
    wait_for(page, CHOSEN, ["cpu:0,cpu:1,cpu:3", "cpu:0", "cpu:1", "cpu:3"])
    set_widgets(page, "StrategySelector", devices="cpu:1")
    wait_for(page, CHOSEN, ["cpu:1", "cpu:0"])
    picker.get_by_label("cpu:0").click()  # the last selected device stays selected
    wait_for(page, CHOSEN, ["cpu:1", "cpu:0"])
    # Undo takes a choice back in one step.
    picker.get_by_label("cpu:1").check()
    wait_for(page, CHOSEN, ["cpu:2", "cpu:0", "cpu:1"])
    command(page, "Comfy.Undo")
    page.wait_for_function(f"() => ({CHOSEN})()[0] === 'cpu:1'")


def test_a_value_from_another_node_is_shown_and_cannot_be_changed(page):
    _show(page, elsewhere="cpu:3")
    picker = open_picker(page)
    page.wait_for_function(f"() => ({CHOSEN})().length === 1 + 3")
    assert "Another node gives devices" in picker.inner_text() and picker.get_by_label("cpu:0").is_disabled()


def test_eight_gpus_and_a_cluster_are_named_with_memory_and_who_uses_them(page):
    every = [f"cuda:{index}" for index in range(8)]
    selected = {"0-1": every[:2], "1": [every[1]], "1,2": every[1:3], "all": every}
    selected |= {",".join(map(str, range(count))): every[:count] for count in range(3, 8)}

    def answer(route) -> None:
        text = route.request.url.partition("text=")[2].replace("%2C", ",").replace("%3A", ":")
        route.fulfill(json={**EIGHT_GPUS, "selected": selected.get(text, [])})

    page.route("**/parallel_sampling/devices*", answer)
    _show(page)
    set_widgets(page, "StrategySelector", devices="0-1")
    picker = open_picker(page)
    wait_for(page, CHOSEN, ["0-1", *every[:2]])
    assert picker.locator("label").count() == 9
    rows = [picker.locator("label").nth(i) for i in range(3)]
    assert [row.evaluate("e => e.classList.contains('busy')") for row in rows] == [True, False, False]
    words = rows[0].inner_text()
    assert all(word in words for word in ("NVIDIA H100", "free 70 GiB of 80 GiB", "sampling 3/28"))
    assert "blender (process 77): 9.50 GiB" in rows[1].inner_text()
    assert "NVSWITCH" in picker.inner_text() and "16 devices on 2 machines" in picker.inner_text()
    picker.get_by_label("cuda:0").uncheck()
    wait_for(page, CHOSEN, ["1", "cuda:1"])
    picker.get_by_label("cuda:2").check()
    wait_for(page, CHOSEN, ["1,2", "cuda:1", "cuda:2"])
    for index in (0, *range(3, 8)):
        picker.get_by_label(f"cuda:{index}").check()
    wait_for(page, CHOSEN, ["all", *every])
    picker.get_by_label("cluster:den").click()
    wait_for(page, CHOSEN, ["cluster:den", "cluster:den"])
    picker.get_by_label("cluster:den").click()
    wait_for(page, CHOSEN, ["all", *every])


def test_the_list_is_updated_until_its_graph_is_left(page):
    _show(page)
    page.evaluate(KEEP_TIMER)
    open_picker(page)
    page.wait_for_function("() => window.again")
    assert page.evaluate(GOES_ON)
    page.evaluate(
        "() => app.loadGraphData({ nodes: [], links: [], version: 0.4, id: 'left' }, true, true, '')"
    )
    assert not page.evaluate(GOES_ON)
    page.evaluate("() => window.keepNoTimer()")
