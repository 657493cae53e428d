"""In a real browser: all that the pack adds to ComfyUI's page follows the page's language and stays complete."""

from __future__ import annotations

import json

import pytest

from comfy_harness import ROOT
from pages import (
    EIGHT_GPUS,
    REPORT,
    choose,
    command,
    locale,
    one_sampler,
    open_picker,
    refused_inputs,
    run,
    set_widgets,
    show_prompt,
    template,
    toast,
    wait_for_report,
    words_of,
)

UNET = "tiny_languages.safetensors"
MODELS = {UNET: 9}
# The texts of the node's panel, of the strategies, and of the sidebar.
SHOWN = """() => ['.parallel-headline', '.parallel-candidates', '.parallel-strategy', '.parallel-status'].map(
  c => document.querySelector(c)?.innerText ?? '').join('\\n')"""
BUSY = "a prompt that uses the devices is running; its turn comes first"
# What a device's card says of its power.
POWER = """async () => {
  const { groupCard } = await import('/extensions/comfyui-parallel-sampling/lib/rank_cards.js');
  const card = groupCard(() => {});
  const gauge = { utilisation: null, temperature: null, power: 300, power_limit: 450, free_bytes: 0 };
  const rank = { rank: 0, device: '', words: '', progress: null, pid: null, weight_bytes: 0, working_bytes: 0, gauge };
  const group = { devices: [], state: 'ready', words: '', reason: '', models: [], why_not: {}, step_seconds: [] };
  card.update({ ...group, ranks: [rank] });
  return card.root.querySelector('.gauges').textContent;
}"""


def _nodes_keep_their_colour(page) -> None:
    workflow = template()
    page.evaluate("w => app.loadGraphData(w, true, true, 'colours')", workflow)
    page.wait_for_function("n => app.graph.nodes.length === n", arg=len(workflow["nodes"]))
    colours = dict(page.evaluate("() => app.graph.nodes.map(n => [n.type, n.color ?? null])"))
    assert colours["StrategySelector"] == colours["ParallelSampler"] is not None
    assert colours["CLIPTextEncode"] is None


def test_every_command_of_ours_has_a_label_in_each_language(page):
    commands = page.evaluate(
        "() => app.extensionManager.command.commands.map(c => c.id).filter(id => id.startsWith('parallel_sampling'))"
    )
    for language in ("en", "es", "zh"):
        assert {command.replace(".", "_") for command in commands} == set(locale(language, "commands"))


def _the_devices_to_choose_from_are_in_the_language(page, language: str) -> None:
    answer = {**EIGHT_GPUS, "selected": []}
    page.route("**/parallel_sampling/devices*", lambda route: route.fulfill(json=answer))
    words = open_picker(page).inner_text()
    assert page.locator(".parallel-devices summary").inner_text() == words_of(language)["choose_devices"]
    assert EIGHT_GPUS["devices"][0]["name"] in words
    for english in ("free ", "processes of", "process", "slowest path", "devices on"):
        assert english not in words
    page.unroute_all()


def _a_loaders_refusal_is_in_the_language(page, language: str, said: dict) -> None:
    page.route("**/parallel_sampling/preload", lambda route: route.fulfill(status=409, json={"error": BUSY}))
    choose(page, "ParallelFluxLoader", words_of(language)["preload"])
    toast(page, said[BUSY][language]).wait_for()


@pytest.mark.parametrize("language", ["es", "zh"], indirect=True)
def test_all_that_we_show_is_in_the_language_and_calls_inputs_as_they_are_labelled(page, measuring, language):
    _nodes_keep_their_colour(page)
    graph = one_sampler(UNET, sampler={"cfg": 3.0, "seed": ord(language[0])})
    show_prompt(page, graph.prompt, "StrategySelector")
    _the_devices_to_choose_from_are_in_the_language(page, language)
    show_prompt(page, graph.prompt, "ParallelSampler")
    page.get_by_role("button", name=words_of(language)["prove"], exact=True).wait_for()
    command(page, "parallel_sampling.status_panel")
    said = {
        one: dict(zip(("es", "zh"), others, strict=True))
        for one, *others in json.loads((ROOT / "web" / "said.json").read_text("utf-8"))["said"]
    }
    wait_for_report(page, said["After a run: what ran, where, why, and how long."][language])
    run(page)
    wait_for_report(page, said["strategy: {why}"][language].split("{")[0])
    (ran,) = measuring.ask("/history?max_items=1", method="GET")[1].values()
    (english,) = [output["text"][0].splitlines() for output in ran["outputs"].values() if "text" in output]
    shown = page.evaluate(REPORT).splitlines()
    assert english[0].startswith("strategy: ")  # the report in the graph stays English
    assert len(shown) == len(english) > 8
    assert [line for line in shown if line in english] == []
    words = page.evaluate(SHOWN)
    for sentence in ("not tried", "exact", "A step of the latest run, by strategy", "Run the doctor"):
        assert said[sentence][language] in words
    # The page shows "ready" only once the ranks are.
    page.wait_for_function(f"word => ({SHOWN})().includes(word)", arg=said["ready"][language])
    assert not any(
        sentence in page.evaluate(SHOWN) for sentence in ("not tried", "Plan for", "Run the", "measured")
    )

    set_widgets(page, "StrategySelector", mode="manual", ulysses_degree=4)
    label = locale(language, "nodeDefs")["StrategySelector"]["inputs"]["ulysses_degree"]["name"]
    alert = page.locator(".parallel-strategy [role=alert]").filter(has_text=label).first
    assert "ulysses_degree" not in alert.inner_text() and "devices" not in alert.inner_text()
    run(page)
    assert not any("needs" in message for _, message in refused_inputs(page))
    _a_loaders_refusal_is_in_the_language(page, language, said)
    assert page.evaluate(POWER) == said["{power} of {limit} W"][language].format(power=300, limit=450)

    headings = locale(language, "main")["settingsCategories"]
    command(page, "Comfy.ShowSettingsDialog")
    dialog = page.get_by_role("dialog")
    dialog.get_by_text(headings["Parallel Sampling"], exact=True).first.click()
    dialog.get_by_text(headings["Devices"], exact=True).first.wait_for()
