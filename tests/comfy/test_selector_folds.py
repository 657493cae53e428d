"""Strategy Selector in a real browser hides the inputs that auto decides. Its checks still work if a reroute or a node
with a constant value is connected."""

from __future__ import annotations

from graphs import Graph
from pages import set_widgets, show_prompt

UNET = "tiny_folds.safetensors"  # two attention heads
MODELS = {UNET: 1}
DECIDED = {
    *("cfg_degree", "pipefusion_degree", "ring_degree", "ulysses_degree", "data_degree", "tensor_degree"),
    *("shard_weights", "offload_weights", "num_pipeline_patch", "warmup_steps"),
}
ALWAYS = {"mode", "devices", "engine", "device_shares", "approximation"}
SELECTOR = "app.graph.nodes.find(n => n.comfyClass === 'StrategySelector')"
ON_CANVAS = f"() => {SELECTOR}.widgets.filter(w => !w.hidden).map(w => w.name)"
BY_VUE = """() => [...document.querySelector('.parallel-strategy').closest('[data-node-id]')
  .querySelectorAll('.lg-node-widget')].map(row => row.innerText.trim().split('\\n')[0])"""
ALERTS = "() => [...document.querySelectorAll('.parallel-strategy [role=alert] p')].map(p => p.textContent)"
NOTES = "() => document.querySelector('.parallel-strategy .notes').textContent"


def _load(page, graph: Graph) -> None:
    show_prompt(page, graph.prompt, "StrategySelector")
    page.wait_for_selector(".parallel-strategy")


def _wait_for(page, function: str, wanted: set[str]) -> None:
    page.wait_for_function(
        f"wanted => {{ const found = ({function})(); return wanted.every(n => found.includes(n)); }}",
        arg=sorted(wanted),
    )


def test_what_auto_decides_is_folded_away_and_seen_where_a_person_sets_it(page, drawn_by):
    shown = BY_VUE if drawn_by == "vue" else ON_CANVAS
    graph = Graph()
    graph.parallel_loader(UNET, "cpu:2")
    _load(page, graph)
    _wait_for(page, shown, ALWAYS)
    assert not set(page.evaluate(shown)) & DECIDED
    set_widgets(page, "StrategySelector", mode="manual")
    _wait_for(page, shown, ALWAYS | DECIDED)
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
    _wait_for(page, shown, ALWAYS | DECIDED)
    set_widgets(page, "StrategySelector", mode="auto")
    page.wait_for_function(f"() => !({shown})().includes('cfg_degree')")


def test_a_reroute_and_a_node_that_holds_a_value_switch_no_check_off(page):
    graph = Graph()
    loader = graph.parallel_loader(UNET, "cpu:3", ulysses=3)
    strategy = graph.prompt[loader]["inputs"]["strategy"][0]
    number = graph.add("PrimitiveInt", value=3)
    graph.prompt[strategy]["inputs"]["ulysses_degree"] = [number, 0]
    _load(page, graph)
    page.evaluate(
        f"""() => {{
          const reroute = LiteGraph.createNode("Reroute");
          app.graph.add(reroute);
          const loader = app.graph.nodes.find(n => n.comfyClass === "ParallelFluxLoader");
          {SELECTOR}.connect(0, reroute, 0);
          reroute.connect(0, loader, loader.inputs.findIndex(i => i.name === "strategy"));
        }}"""
    )
    page.wait_for_function(f"() => ({ALERTS})().some(t => t.includes('2 attention heads'))")
    set_widgets(page, "PrimitiveInt", value=2)
    set_widgets(page, "StrategySelector", ring_degree=2)
    page.wait_for_function(f"() => ({ALERTS})()[0]?.startsWith('Ring 2 × Ulysses 2 needs 4')")

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
    page.wait_for_function(f"() => ({NOTES})().startsWith('ulysses_degree comes from another node')")
    assert page.evaluate(ALERTS) == []
    set_widgets(page, "StrategySelector", cfg_degree=3)
    page.wait_for_function(f"() => ({ALERTS})().some(t => t.startsWith('cfg_degree 3: there are'))")
