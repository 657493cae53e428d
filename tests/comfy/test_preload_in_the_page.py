"""In a real browser, Preload in a loader's menu loads its model on the devices and shows the outcome."""

from __future__ import annotations

from graphs import Graph
from pages import choose, menu_of, set_widget, show_prompt, words_of

UNET = "tiny_preload.safetensors"
MODELS = {UNET: 3}


def test_preload_says_what_it_did_and_why_it_could_not(page, measuring):
    measuring[0].stop_ranks()  # a preload would be refused if it had to end other ranks
    words = words_of()
    graph = Graph()
    loader = graph.parallel_loader(UNET, "cpu:2", ulysses=2)
    graph.save(graph.parallel_sampler(loader, graph.text(1), graph.text(2), graph.latent()), "preload")
    show_prompt(page, graph.prompt, "ParallelFluxLoader")
    assert words["preload"] not in menu_of(page, "ParallelSampler")

    def preload(said: str) -> None:
        choose(page, "ParallelFluxLoader", words["preload"])
        page.get_by_text(said).first.wait_for(timeout=60_000)

    preload(words["preloaded"].format(model=UNET, devices="cpu:0, cpu:1"))
    preload(words["preload_held"].format(model=UNET, devices="cpu:0, cpu:1"))
    set_widget(page, "ParallelFluxLoader", "unet_name", "nowhere.safetensors")
    preload("nowhere.safetensors")
    page.evaluate("() => { app.graph.nodes.find(n => n.type === 'ParallelFluxLoader').mode = 2; }")
    preload(words["preload_off"])
