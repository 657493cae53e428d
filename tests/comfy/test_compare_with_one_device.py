"""Compare With One Device runs a job on one warm rank and on all; exact strategies give the same picture."""

from __future__ import annotations

import re

import pytest

from comfyui_client import PromptFailed
from graphs import Graph

STEPS = 4
TIMES = r"{}: {} steps in [\d.]+ s, median [\d.]+ s"


def _graph(unet: str, changes: dict | None = None, **choice) -> tuple[Graph, str]:
    """Returns a graph that compares, and the id of its comparing node."""
    graph = Graph()
    loader = graph.parallel_loader(unet, "cpu:2", **choice)
    wanted = {"steps": STEPS, **(changes or {})}
    latent, _ = graph.parallel_sampler(loader, *graph.request(), **wanted)
    compared = graph.prompt[latent]
    compared["class_type"] = "CompareWithOneDevice"
    compared["inputs"]["vae"] = [graph.add("TestTinyVAE"), 0]
    return graph, latent


def _compare(comfy, graph: Graph, node: str) -> tuple[dict, str, dict]:
    """Returns (the comparison as the page gets it, the report, all that the page gets)."""
    shown = comfy.run(graph.prompt)["outputs"][node]
    return shown["parallel_comparison"][0], shown["text"][0], shown


def test_an_exact_strategy_gives_the_picture_of_one_device_and_both_times_are_told(comfy, unet):
    graph, node = _graph(unet, changes={"seed": 11})
    shown, report, whole = _compare(comfy, graph, node)
    assert shown["titles"] == ["one device", "Ulysses 2"]
    assert shown["exact"] and shown["levels"] == 0
    assert len(shown["pictures"]) == 2 and all(seconds > 0 for seconds in shown["seconds"])
    one, split, speed = report.splitlines()[:3]
    assert re.fullmatch(TIMES.format("one device", STEPS), one)
    assert re.fullmatch(TIMES.format("Ulysses 2", STEPS), split)
    times = f"{shown['seconds'][1]:g} s instead of {shown['seconds'][0]:g} s per step"
    assert speed == f"speed: {shown['compared']} ({times})" and shown["devices"] == 2
    assert "\nlargest difference: 0 of 255 in the pictures (exact)\n" in report
    rows = {row["strategy"]: row for row in whole["parallel_candidates"]}
    assert rows["Ulysses 2"]["chosen"] and not rows["one device"]["chosen"]
    assert rows["one device"]["how"] == rows["Ulysses 2"]["how"] == "measured"
    assert rows["Ring 2"]["inputs"]["ring_degree"] == 2 and rows["Ring 2"]["inputs"]["mode"] == "manual"
    assert "\nstrategy: Ulysses 2" in report and "devices: cpu:0, cpu:1" in report


def test_the_pictures_are_outputs_and_the_ranks_stay_warm(comfy, unet):
    graph, node = _graph(unet, changes={"seed": 12})
    _compare(comfy, graph, node)
    before = {process.pid for process in comfy.ranks()}
    graph, node = _graph(unet, changes={"seed": 13})
    mask = [graph.add("ImageToMask", image=[node, 0], channel="red"), 0]
    graph.add("TestSaveText", text=[node, 2], path="compared.txt")
    graph.add("PreviewImage", images=[node, 1])
    graph.add("MaskPreview", mask=mask)
    _compare(comfy, graph, node)
    assert {process.pid for process in comfy.ranks()} == before and len(before) == 2
    assert comfy.output("compared.txt").read_text().startswith("one device: ")


@pytest.mark.parametrize(
    ("changes", "choice", "words"),
    [
        ({}, {"ulysses": 1, "ring": 1}, "set by hand to one device"),
        ({"denoise": 0.0}, {}, "denoise is 0"),
    ],
)
def test_what_cannot_be_compared_is_refused_with_a_remedy(comfy, unet, changes, choice, words):
    graph, node = _graph(unet, changes, **choice)
    with pytest.raises(PromptFailed, match=words) as failed:
        comfy.run(graph.prompt)
    assert failed.value.node_id == node


def test_sound_is_refused_since_it_has_no_picture(comfy, unet):
    graph, node = _graph(unet)
    latent = [graph.add("EmptyLatentAudio", seconds=1.0, batch_size=1), 0]
    graph.prompt[node]["inputs"]["latent_image"] = latent
    with pytest.raises(PromptFailed, match="The latent_image is sound"):
        comfy.run(graph.prompt)
