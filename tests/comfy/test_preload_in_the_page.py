"""In a real browser: Preload in a loader's menu puts its model on the devices, and says what became of it."""

from __future__ import annotations

import json

import pytest

from comfy_harness import ROOT
from graphs import Graph

UNET = "tiny_preload.safetensors"
CHOOSE = """([type, words]) => app.canvas.getNodeMenuOptions(app.graph.nodes.find(n => n.type === type)).find(
  item => item?.content === words).callback()"""
MENU = """(type) => app.canvas.getNodeMenuOptions(app.graph.nodes.find(n => n.type === type)).map(
  item => item?.content).filter(Boolean)"""


@pytest.fixture(scope="module", autouse=True)
def model(measuring):
    """There before the page asks which models there are. A preload ends no ranks that others have left."""
    measuring[0].write_flux(UNET, single_blocks=3)
    measuring[0].stop_ranks()


def test_preload_says_what_it_did_and_why_it_could_not(page, measuring):
    words = json.loads((ROOT / "locales" / "en" / "main.json").read_text("utf-8"))["parallel_sampling"]
    graph = Graph()
    loader = graph.parallel_loader(UNET, "cpu:2", ulysses=2)
    graph.save(graph.parallel_sampler(loader, graph.text(1), graph.text(2), graph.latent()), "preload")
    page.evaluate(f"() => app.loadApiJson({json.dumps(graph.prompt)}, 'preload')")
    page.wait_for_function("n => app.graph.nodes.length === n", arg=len(graph.prompt))
    assert words["preload"] not in page.evaluate(MENU, "ParallelSampler")

    def choose(said: str) -> None:
        page.evaluate(CHOOSE, ["ParallelFluxLoader", words["preload"]])
        page.get_by_text(said).first.wait_for(timeout=60_000)

    choose(words["preloaded"].format(model=UNET, devices="cpu:0, cpu:1"))
    choose(words["preload_held"].format(model=UNET, devices="cpu:0, cpu:1"))
    page.evaluate(
        """() => { app.graph.nodes.find(n => n.type === 'ParallelFluxLoader').widgets.find(
          w => w.name === 'unet_name').value = 'nowhere.safetensors'; }"""
    )
    choose("nowhere.safetensors")
    page.evaluate("() => { app.graph.nodes.find(n => n.type === 'ParallelFluxLoader').mode = 2; }")
    choose(words["preload_off"])
