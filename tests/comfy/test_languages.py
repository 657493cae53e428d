"""In a real browser: what the pack adds to ComfyUI's page follows its language, and nothing is lost with it."""

from __future__ import annotations

import json

import pytest

from comfy_harness import ROOT

COLOURS = "() => app.graph.nodes.map(n => [n.type, n.color ?? null])"


@pytest.fixture
def speak(page):
    """Has ComfyUI's page speak a language until the test ends; it is kept on the server that tests share."""

    def set_language(language: str) -> None:
        page.evaluate("language => app.extensionManager.setting.set('Comfy.Locale', language)", language)
        page.reload()
        page.wait_for_function("() => window.app?.extensionManager && window.app?.graph", timeout=60_000)
        name = "parallel_sampling.node_colors"
        page.wait_for_function(f"() => app.extensions.some(e => e.name === '{name}')", timeout=60_000)

    yield set_language
    page.evaluate("() => app.extensionManager.setting.set('Comfy.Locale', 'en')")


@pytest.mark.parametrize("language", ["es", "zh"])
def test_our_nodes_keep_their_colour_and_our_commands_and_headings_are_translated(page, speak, language):
    speak(language)
    workflow = json.loads((ROOT / "example_workflows" / "Try it without a download.json").read_text("utf-8"))
    page.evaluate("w => app.loadGraphData(w, true, true, 'colours')", workflow)
    page.wait_for_function("n => app.graph.nodes.length === n", arg=len(workflow["nodes"]))
    colours = dict(page.evaluate(COLOURS))
    assert colours["StrategySelector"] == colours["ParallelSampler"] is not None
    assert colours["CLIPTextEncode"] is None

    locale = ROOT / "locales" / language
    headings = json.loads((locale / "main.json").read_text("utf-8"))["settingsCategories"]
    page.evaluate("() => app.extensionManager.command.execute('Comfy.ShowSettingsDialog')")
    page.get_by_text(headings["Parallel Sampling"], exact=True).first.click(timeout=20_000)
    page.get_by_text(headings["Devices"], exact=True).first.wait_for(timeout=20_000)


@pytest.mark.parametrize("language", ["en", "es", "zh"])
def test_every_command_of_ours_has_a_label_in_each_language(page, language):
    labels = json.loads((ROOT / "locales" / language / "commands.json").read_text("utf-8"))
    commands = page.evaluate(
        "() => app.extensionManager.command.commands.map(c => c.id).filter(id => id.startsWith('parallel_sampling'))"
    )
    assert {command.replace(".", "_") for command in commands} == set(labels)
