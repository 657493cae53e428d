"""In a real browser, Preload in a loader's menu loads its model on the devices and shows the outcome."""

from __future__ import annotations

from pages import choose, menu_of, one_sampler, set_widgets, show_prompt, words_of

UNET = "tiny_preload.safetensors"
MODELS = {UNET: 3}


def test_preload_says_what_it_did_and_why_it_could_not(page, measuring):
    measuring[0].stop_ranks()  # a preload would be refused if it had to end other ranks
    words = words_of()
    show_prompt(page, one_sampler(UNET, ulysses=2).prompt, "ParallelFluxLoader")
    assert words["preload"] not in menu_of(page, "ParallelSampler")

    def preload(said: str) -> None:
        choose(page, "ParallelFluxLoader", words["preload"])
        page.get_by_text(said).first.wait_for()

    preload(words["preloaded"].format(model=UNET, devices="cpu:0, cpu:1"))
    preload(words["preload_held"].format(model=UNET, devices="cpu:0, cpu:1"))
    set_widgets(page, "ParallelFluxLoader", unet_name="nowhere.safetensors")
    preload("nowhere.safetensors")
    page.evaluate("() => { app.graph.nodes.find(n => n.type === 'ParallelFluxLoader').mode = 2; }")
    preload(words["preload_off"])
