"""In a real browser, a node's information shows its help page with its picture, and no node of ours covers another."""

from __future__ import annotations

import json

import pytest

from comfy_harness import ROOT

# Titles lie above a node's position.
OVERLAPS = """() => {
  const box = (n) => [n.pos[0], n.pos[1] - LiteGraph.NODE_TITLE_HEIGHT, n.pos[0] + n.size[0], n.pos[1] + n.size[1]];
  const found = [];
  for (const a of app.graph.nodes) for (const b of app.graph.nodes) {
    const [p, q] = [box(a), box(b)];
    if (a.id < b.id && p[0] < q[2] && q[0] < p[2] && p[1] < q[3] && q[1] < p[3]) found.push([a.title, b.title]);
  }
  return found;
}"""


def _load(page, name: str) -> None:
    workflow = (ROOT / "example_workflows" / f"{name}.json").read_text("utf-8")
    page.evaluate("workflow => app.loadGraphData(workflow)", json.loads(workflow))
    page.wait_for_function("n => app.graph.nodes.length === n", arg=len(json.loads(workflow)["nodes"]))


def test_the_help_of_a_node_is_its_page(page):
    _load(page, "demo_no_downloads")
    page.evaluate("() => app.canvas.selectNode(app.graph.nodes.find(n => n.type === 'ParallelSampler'))")
    page.get_by_test_id("info-button").first.dispatch_event("click")  # it may lie under the tabs
    help_page = page.locator(".node-help-content")
    help_page.get_by_role("heading", name="Parallel Sampler").wait_for(timeout=60_000)
    assert "PipeFusion is approximate after its warm-up" in help_page.inner_text()
    picture = help_page.locator("img").element_handle()
    page.wait_for_function("picture => picture.naturalWidth > 0", arg=picture)


@pytest.mark.parametrize(
    "name", ["flux_dev_controlnet", "flux_dev_lora_parallel", "stock_ksampler_parallel_model"]
)
def test_nodes_do_not_overlap_at_the_sizes_that_the_page_gives_them(page, name):
    """ComfyUI's page enlarges a node whose widgets do not fit."""
    _load(page, name)
    assert page.evaluate(OVERLAPS) == []
