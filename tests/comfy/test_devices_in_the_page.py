"""The picker of the input `devices` in a real browser: it lists devices and who uses them, and writes the input."""

from __future__ import annotations

from graphs import Graph
from pages import EIGHT_GPUS, command, open_picker, set_widget, show_prompt, wait_for_extensions

UNET = "tiny_devices.safetensors"  # two attention heads
MODELS = {UNET: 1}
SELECTOR = "app.graph.nodes.find(n => n.comfyClass === 'StrategySelector')"
TEXT = f"() => {SELECTOR}.widgets.find(w => w.name === 'devices').value"


# Keeps the timer of the list in `again` instead of setting it.
KEEP_TIMER = """() => {
  const { setTimeout } = window;
  window.again = null;
  window.setTimeout = (act, ms, ...rest) => (ms === 2000 ? void (window.again = act) : setTimeout(act, ms, ...rest));
}"""
# Lets the kept timer come, and says if it is set once more.
GOES_ON = """async () => {
  const act = window.again;
  window.again = null;
  await act();
  return window.again !== null;
}"""


def _show(page, devices="cpu:2") -> None:
    graph = Graph()
    graph.parallel_loader(UNET, devices)
    show_prompt(page, graph.prompt, "StrategySelector")
    page.evaluate(f"() => {{ {SELECTOR}.setSize([420, 700]); }}")


def _wait_for(page, text: str, checked: list[str]) -> None:
    page.wait_for_function(
        f"""([text, checked]) => ({TEXT})() === text && JSON.stringify(checked) === JSON.stringify(
          [...document.querySelectorAll('.parallel-devices label')].filter(l => l.control.checked)
            .map(l => l.querySelector('b').textContent))""",
        arg=[text, checked],
    )


def test_a_machine_without_gpus_says_so_and_lists_its_cpu(page):
    _show(page)
    picker = open_picker(page)
    _wait_for(page, "cpu:2", ["cpu:0", "cpu:1"])
    words = picker.inner_text()
    assert "No usable GPU" in words and "GiB" in words and words.count("free ") >= 2
    # A typed text still counts, and the picker follows it.
    set_widget(page, "StrategySelector", "devices", "cpu:4")
    _wait_for(page, "cpu:4", [f"cpu:{rank}" for rank in range(4)])
    picker.get_by_label("cpu:2").focus()
    page.keyboard.press("Space")
    _wait_for(page, "cpu:0,cpu:1,cpu:3", ["cpu:0", "cpu:1", "cpu:3"])
    set_widget(page, "StrategySelector", "devices", "cpu:1")
    _wait_for(page, "cpu:1", ["cpu:0"])
    picker.get_by_label("cpu:0").click()  # the last selected device stays selected
    _wait_for(page, "cpu:1", ["cpu:0"])
    # Undo takes a choice back in one step.
    picker.get_by_label("cpu:1").check()
    _wait_for(page, "cpu:2", ["cpu:0", "cpu:1"])
    command(page, "Comfy.Undo")
    page.wait_for_function(f"() => ({TEXT})() === 'cpu:1'")

    # A value from another node is shown and cannot be changed.
    graph = Graph()
    loader = graph.parallel_loader(UNET, "cpu:2")
    strategy = graph.prompt[loader]["inputs"]["strategy"][0]
    graph.prompt[strategy]["inputs"]["devices"] = [graph.add("PrimitiveString", value="cpu:3"), 0]
    show_prompt(page, graph.prompt, "StrategySelector")
    picker = open_picker(page)
    page.wait_for_function(
        "() => [...document.querySelectorAll('.parallel-devices input')].filter(i => i.checked).length === 3"
    )
    assert "Another node gives devices" in picker.inner_text() and picker.get_by_label("cpu:0").is_disabled()


def test_eight_gpus_and_a_cluster_are_named_with_memory_and_who_uses_them(page, drawn_by):
    selected = {"0-1": [0, 1], "1": [1], "1,2": [1, 2], "all": range(8)}

    def answer(route) -> None:
        text = route.request.url.partition("text=")[2].replace("%2C", ",").replace("%3A", ":")
        route.fulfill(json={**EIGHT_GPUS, "selected": [f"cuda:{i}" for i in selected.get(text, ())]})

    page.route("**/parallel_sampling/devices*", answer)
    _show(page)
    set_widget(page, "StrategySelector", "devices", "0-1")
    picker = open_picker(page)
    _wait_for(page, "0-1", ["cuda:0", "cuda:1"])
    assert picker.locator("label").count() == 9
    rows = [picker.locator("label").nth(i) for i in range(3)]
    assert [row.evaluate("e => e.classList.contains('busy')") for row in rows] == [True, False, False]
    assert all(
        word in rows[0].inner_text() for word in ("NVIDIA H100", "free 70 GiB of 80 GiB", "sampling 3/28")
    )
    assert "blender (process 77): 9.50 GiB" in rows[1].inner_text()
    assert "NVSWITCH" in picker.inner_text() and "16 devices on 2 machines" in picker.inner_text()
    picker.get_by_label("cuda:0").uncheck()
    _wait_for(page, "1", ["cuda:1"])
    picker.get_by_label("cuda:2").check()
    _wait_for(page, "1,2", ["cuda:1", "cuda:2"])
    for index in (0, *range(3, 8)):
        selected[",".join(map(str, sorted({1, 2, 0, *range(3, index + 1)})))] = [
            0,
            1,
            2,
            *range(3, index + 1),
        ]
        picker.get_by_label(f"cuda:{index}").check()
    _wait_for(page, "all", [f"cuda:{i}" for i in range(8)])
    picker.get_by_label("cluster:den").click()
    _wait_for(page, "cluster:den", ["cluster:den"])
    picker.get_by_label("cluster:den").click()
    _wait_for(page, "all", [f"cuda:{i}" for i in range(8)])


def test_the_list_is_updated_until_its_graph_is_left(page):
    _show(page)
    page.evaluate(KEEP_TIMER)
    open_picker(page)
    page.wait_for_function("() => window.again")
    assert page.evaluate(GOES_ON)
    page.evaluate(
        "id => app.loadGraphData({ nodes: [], links: [], version: 0.4, id }, true, true, 'left')", "left"
    )
    assert not page.evaluate(GOES_ON)
    page.reload()  # with its own timers
    wait_for_extensions(page)
