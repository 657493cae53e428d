"""Strategy Selector and Parallel Sampler in a real browser: the diagram, errors while editing, and the report.

Strategy Selector hides the inputs that auto decides. Its checks still work if a reroute or a node with a constant value
is connected.
"""

from __future__ import annotations

from graphs import AXES, Graph
from pages import (
    REPORT,
    one_sampler,
    run,
    set_widgets,
    show_prompt,
    template,
    wait_for,
    wait_for_report,
)

UNET = "tiny_panel.safetensors"  # two attention heads
MODELS = {UNET: 4}
ALWAYS = {"mode", "devices", "engine", "device_shares", "approximation"}
DECIDED = {f"{axis}_degree" for axis in AXES}  # by auto
DECIDED |= {"shard_weights", "offload_weights", "num_pipeline_patch", "warmup_steps"}
# Reads the panel as a person would: the text of the cells, the marked row, and if anything is cut off.
READ = """() => {
  const panel = document.querySelector('.parallel-strategy');
  return {
    text: panel.textContent,
    basis: panel.querySelector('.basis').textContent,
    titles: [...panel.querySelectorAll('figcaption')].map(c => c.textContent),
    devices: [...panel.querySelectorAll('li.device')].map(d => d.title),
    groups: [...panel.querySelectorAll('li.group > span')].map(g => g.textContent),
    alerts: [...panel.querySelectorAll('[role=alert] p')].map(p => p.textContent),
    notes: panel.querySelector('.notes')?.textContent ?? '',
    rows: [...panel.querySelectorAll('tr')].map(r => [...r.cells].map(c => c.innerText.trim())),
    chosen: [...panel.querySelectorAll('tr[aria-current]')].map(r => r.cells[0].innerText.trim()),
    cut: panel.scrollWidth > panel.clientWidth + 1,
  };
}"""
WIDGETS = """() => app.graph.nodes.find(n => n.comfyClass === 'StrategySelector').widgets.map(
  w => ({ name: w.name, off: w.disabled, label: w.label, value: w.value }))"""
SIZES = "() => app.graph.nodes.map(n => [n.type, n.size[0], n.size[1]])"
# Returns the position of a number widget's right arrow on the canvas.
ARROW = """name => {
  const node = app.graph.nodes.find(n => n.comfyClass === 'StrategySelector');
  const { scale, offset } = app.canvas.ds;
  const y = node.pos[1] + node.widgets.find(w => w.name === name).y + 10;
  return [(node.pos[0] + node.size[0] - 25 + offset[0]) * scale, (y + offset[1]) * scale];
}"""


def _show(page, graph: Graph) -> None:
    show_prompt(page, graph.prompt, "StrategySelector")
    page.wait_for_selector(".parallel-strategy")


def _load(page, devices: str = "cpu:2", **choice) -> None:
    _show(page, one_sampler(UNET, devices, {"cfg": 3.0}, **choice))


def _edit(page, **inputs) -> None:
    set_widgets(page, "StrategySelector", **inputs)


def _wait_for(page, condition: str) -> None:
    """Waits until `condition` is true: JavaScript about `shown`, the object that READ returns."""
    page.wait_for_function(f"() => {{ const shown = ({READ})(); return {condition}; }}")


def _off(page) -> set[str]:
    return {widget["name"] for widget in page.evaluate(WIDGETS) if widget["off"]}


def test_the_diagram_and_the_degrees_follow_the_inputs(page):
    _load(page, "cpu:8", cfg=2, ring=2, ulysses=2)
    _wait_for(page, "shown.devices.length === 8")
    shown = page.evaluate(READ)
    assert shown["basis"] == "Set by hand" and shown["titles"] == ["CFG 2 × Ring 2 × Ulysses 2"]
    assert shown["groups"] == ["prompt", "ring 1/2", "ring 2/2", "negative prompt", "ring 1/2", "ring 2/2"]
    assert shown["devices"][3] == "cpu:3 · prompt · ring 2/2 · heads 2/2"
    assert shown["devices"][4] == "cpu:4 · negative prompt · ring 1/2 · heads 1/2"
    assert _off(page) == set() and not shown["cut"]

    live = page.evaluate(ARROW, "data_degree")
    page.mouse.click(*live)  # in manual mode the click counts, and 16 devices are not selected
    _wait_for(page, "shown.alerts.length === 1")
    assert "needs 16 devices; 8 are selected" in page.evaluate(READ)["alerts"][0]

    _edit(page, mode="auto")
    _wait_for(page, "shown.titles.length === 2")
    shown = page.evaluate(READ)
    assert shown["alerts"] == []
    assert shown["titles"][0].startswith("Without a negative prompt: Ring 4 × Ulysses 2")
    assert shown["titles"][1].startswith("With a negative prompt: CFG 2")
    assert _off(page) == DECIDED
    before = page.evaluate(WIDGETS)
    page.mouse.click(*live)
    assert page.evaluate(WIDGETS) == before


def test_an_invalid_degree_is_marked_in_the_backends_words_until_it_is_corrected(page, measuring, drawn_by):
    _load(page, "cpu:3", ulysses=2)
    _wait_for(page, "shown.devices.length === 3")
    plain = page.evaluate(WIDGETS)
    assert page.evaluate(READ)["devices"][2] == "cpu:2 · idle"

    # The rules of the model that the loader names apply.
    if drawn_by == "vue":
        row = page.locator(".lg-node-widget", has_text="ulysses_degree")
        row.get_by_role("button", name="Increment").click()
    else:
        page.mouse.click(*page.evaluate(ARROW, "ulysses_degree"))
    _wait_for(page, "shown.alerts.length === 1")
    (alert,) = page.evaluate(READ)["alerts"]
    assert alert.startswith(f"ulysses_degree 3 is more than the 2 attention heads of {UNET}; the nearest")
    marked = [widget["label"] for widget in page.evaluate(WIDGETS) if "⚠" in (widget["label"] or "")]
    assert marked == ["⚠ ulysses_degree"]
    invalid = page.locator("[aria-invalid=true]")
    if drawn_by == "vue":
        invalid.wait_for()
    asked = {
        "inputs": {"mode": "manual", "devices": "cpu:3", "ulysses_degree": 3},
        "loader": {"node": "ParallelFluxLoader", "unet_name": UNET},
    }
    _, said = measuring.ask("/parallel_sampling/check_strategy", asked)
    assert said["problems"] == [{"inputs": ["ulysses_degree"], "message": alert}]

    _edit(page, ulysses_degree=2)
    _wait_for(page, "shown.alerts.length === 0")
    page.wait_for_function("() => !document.querySelector('[aria-invalid=true]')")
    assert page.evaluate(WIDGETS) == plain

    _edit(page, mode="auto")
    _wait_for(page, "shown.basis.startsWith('Plan for')")
    assert "ulysses_degree" in _off(page)
    if drawn_by == "vue":
        page.get_by_role("switch", name="shard_weights").wait_for(state="detached")


def test_an_answer_that_comes_late_is_dropped(page):
    _load(page, ring=2)
    _wait_for(page, "shown.devices.length === 2")
    held = []

    def hold(route):
        held.append(route) if '"ring_degree":7' in route.request.post_data else route.continue_()

    page.route("**/check_strategy", hold)
    with page.expect_request("**/check_strategy"):
        _edit(page, ring_degree=7)
    _edit(page, ring_degree=1)
    _wait_for(page, "shown.titles[0] === 'one device'")
    with page.expect_response("**/check_strategy") as answer:
        held[0].continue_()
    assert answer.value.json()["problems"]
    page.wait_for_timeout(200)
    shown = page.evaluate(READ)
    assert shown["alerts"] == [] and shown["titles"] == ["one device"]


def test_after_a_run_the_nodes_show_what_ran_and_still_do_when_the_page_is_loaded_anew(page):
    _load(page)
    _wait_for(page, "shown.titles.length === 2")
    assert "After a run" in page.evaluate(READ)["text"]
    sizes = page.evaluate(SIZES)

    run(page)
    page.wait_for_selector(".parallel-candidates tr[aria-current]")
    shown = page.evaluate(READ)
    names = [row[0].split("\n")[0].removeprefix("→ ") for row in shown["rows"]]
    assert {"one device", "CFG 2"} <= set(names) and len(names) == len(set(names))
    assert shown["rows"][0][0].startswith("→ ") and len(shown["chosen"]) == 1
    assert " s" in shown["rows"][0][1] and "measured" in shown["rows"][0][1]
    for name, time, memory in shown["rows"]:
        assert ("measured" in time and " s" in time) or time == "not tried"
        assert memory.endswith("GiB") and ("exact" in name or "approximate" in name)
    assert not shown["cut"]
    assert shown["basis"] == "The latest run" and shown["titles"] == [names[0]]
    assert len(shown["devices"]) == 2

    said = f"strategy: {names[0]}"
    wait_for_report(page, said)
    report = page.evaluate(REPORT)
    panels = {"StrategySelector", "TestSave"}
    before, after = ([size for size in found if size[0] in panels] for found in (sizes, page.evaluate(SIZES)))
    assert after == before  # a panel's content never makes its node larger
    # The headline is visible without scrolling; the rest unfolds and scrolls inside the node.
    headline = page.locator(".parallel-headline")
    assert headline.is_visible() and headline.evaluate("e => e.scrollHeight <= e.clientHeight + 1")
    assert not page.locator(".parallel-report").is_visible()
    page.locator(".parallel-fold summary").focus()
    page.keyboard.press("Enter")
    page.locator(".parallel-report").wait_for()
    box = page.locator(".parallel-fold").evaluate("e => [e.scrollHeight > e.clientHeight, e.clientHeight]")
    assert box[0] and box[1] < 300

    _edit(page, engine="native")  # differs from the inputs that ran
    _wait_for(page, "shown.basis.startsWith('Plan for')")
    _edit(page, engine="auto")
    _wait_for(page, "shown.basis === 'The latest run'")

    # Like undo, it creates all nodes of the workflow again.
    page.evaluate("() => app.loadGraphData(app.graph.serialize(), false, false)")
    wait_for_report(page, said)
    _wait_for(page, "shown.basis === 'The latest run'")

    page.reload()
    wait_for(page, REPORT, report)
    _wait_for(page, "shown.basis === 'The latest run'")
    page.wait_for_function(f"() => ({WIDGETS})().some(w => w.off)")


def test_our_nodes_are_coloured_alike_and_a_workflow_stays_as_it_was_saved(page, set_setting):
    workflow = template()
    own = next(node for node in workflow["nodes"] if node["type"] == "ParallelDemoLoader")
    own["color"] = own["bgcolor"] = "#323232"  # a person's own choice
    page.evaluate("w => app.loadGraphData(w, true, true, 'colours')", workflow)
    _wait_for(page, "shown.titles.length === 2")
    colors = dict(page.evaluate("() => app.graph.nodes.map(n => [n.type, n.color])"))
    assert colors["StrategySelector"] == colors["ParallelSampler"] != own["color"]
    assert colors["ParallelDemoLoader"] == own["color"] and colors["CLIPTextEncode"] is None
    _links_have_colours_of_their_own(page, set_setting)
    saved = {node["type"]: node for node in page.evaluate("() => app.graph.serialize().nodes")}
    assert "color" not in saved["ParallelSampler"] and saved["ParallelDemoLoader"]["color"] == own["color"]
    for node in workflow["nodes"]:
        if node["type"] in ("StrategySelector", "ParallelSampler"):
            values, before = saved[node["type"]]["widgets_values"], node["widgets_values"]
            assert values[: len(before)] == before
            # A later version would take a panel's empty text for the value of an input.
            assert values.count("") == before.count("")
    modified = """() => {
      const { activeWorkflow } = app.extensionManager.workflow;
      activeWorkflow.changeTracker.captureCanvasState();
      return activeWorkflow.isModified;
    }"""
    assert page.evaluate(modified) is False


def _links_have_colours_of_their_own(page, set_setting) -> None:
    """Asserts that the canvas and Vue give each link type the same colour, different per type, in both palettes."""
    for palette in ("light", "dark"):
        set_setting("Comfy.ColorPalette", palette)
        drawn = page.evaluate(
            """() => ['PARALLEL_STRATEGY', 'PARALLEL_MODEL', 'MODEL', 'LATENT', 'CONDITIONING'].map(type => [
              LGraphCanvas.link_type_colors[type], app.canvas.default_connection_color_byType[type],
              getComputedStyle(document.documentElement).getPropertyValue(`--color-datatype-${type}`).trim()])"""
        )
        for ways in drawn:
            assert len({way.lower() for way in ways}) == 1, drawn
        assert len({ways[0].lower() for ways in drawn}) == len(drawn) and all(ways[0] for ways in drawn)


SELECTOR = "app.graph.nodes.find(n => n.comfyClass === 'StrategySelector')"
ON_CANVAS = f"() => {SELECTOR}.widgets.filter(w => !w.hidden).map(w => w.name)"
BY_VUE = """() => [...document.querySelector('.parallel-strategy').closest('[data-node-id]')
  .querySelectorAll('.lg-node-widget')].map(row => row.innerText.trim().split('\\n')[0])"""


def _wait_for_all(page, function: str, wanted: set[str]) -> None:
    page.wait_for_function(
        f"wanted => {{ const found = ({function})(); return wanted.every(n => found.includes(n)); }}",
        arg=sorted(wanted),
    )


def test_what_auto_decides_is_folded_away_and_seen_where_a_person_sets_it(page, drawn_by):
    shown = BY_VUE if drawn_by == "vue" else ON_CANVAS
    graph = Graph()
    graph.parallel_loader(UNET, "cpu:2")
    _show(page, graph)
    _wait_for_all(page, shown, ALWAYS)
    assert not set(page.evaluate(shown)) & DECIDED
    set_widgets(page, "StrategySelector", mode="manual")
    _wait_for_all(page, shown, ALWAYS | DECIDED)
    saved = page.evaluate(f"() => {SELECTOR}.serialize().widgets_values")
    assert saved == ["manual", "cpu:2", 1, 1, 1, 1, 1, "auto", 1, False, False, 0, 1, "", "if_needed"]
    # A workflow saved by a version that hid no inputs.
    page.evaluate(
        """async () => {
          const saved = app.graph.serialize();
          for (const node of saved.nodes) delete node.showAdvanced;
          await app.loadGraphData(saved, true, true, 'old');
        }"""
    )
    _wait_for_all(page, shown, ALWAYS | DECIDED)
    set_widgets(page, "StrategySelector", mode="auto")
    page.wait_for_function(f"() => !({shown})().includes('cfg_degree')")


def test_a_reroute_and_a_node_that_holds_a_value_switch_no_check_off(page):
    graph = Graph()
    loader = graph.parallel_loader(UNET, "cpu:3", ulysses=3)
    strategy = graph.prompt[loader]["inputs"]["strategy"][0]
    number = graph.add("PrimitiveInt", value=3)
    graph.prompt[strategy]["inputs"]["ulysses_degree"] = [number, 0]
    _show(page, graph)
    page.evaluate(
        f"""() => {{
          const reroute = LiteGraph.createNode("Reroute");
          app.graph.add(reroute);
          const loader = app.graph.nodes.find(n => n.comfyClass === "ParallelFluxLoader");
          {SELECTOR}.connect(0, reroute, 0);
          reroute.connect(0, loader, loader.inputs.findIndex(i => i.name === "strategy"));
        }}"""
    )
    _wait_for(page, "shown.alerts.some(t => t.includes('2 attention heads'))")
    set_widgets(page, "PrimitiveInt", value=2)
    set_widgets(page, "StrategySelector", ring_degree=2)
    _wait_for(page, "shown.alerts[0]?.startsWith('Ring 2 × Ulysses 2 needs 4')")

    # A value that a run has to compute is unknown; the other inputs are checked.
    page.evaluate(
        f"""() => {{
          const text = LiteGraph.createNode("TestAnything");
          app.graph.add(text);
          const slot = {SELECTOR}.inputs.findIndex(i => i.name === "ulysses_degree");
          text.connect(0, {SELECTOR}, slot);
        }}"""
    )
    set_widgets(page, "StrategySelector", ring_degree=1)
    _wait_for(page, "shown.notes.startsWith('ulysses_degree comes from another node')")
    assert page.evaluate(READ)["alerts"] == []
    set_widgets(page, "StrategySelector", cfg_degree=3)
    _wait_for(page, "shown.alerts.some(t => t.startsWith('cfg_degree 3: there are'))")
