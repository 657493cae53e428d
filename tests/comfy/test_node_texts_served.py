"""The English locale says what the schemas say, and the real ComfyUI serves locales and help pages."""

from __future__ import annotations

import json
import urllib.request

import pytest

from comfy_harness import ROOT
from write_english_locale import ENGLISH, english, own_nodes


def test_the_english_locale_is_what_the_schemas_say(comfy):
    said = english(comfy.registry)
    assert json.loads(ENGLISH.read_text("utf-8")) == said, "run: python scripts/write_english_locale.py"


def test_every_node_can_be_found_by_other_words(comfy):
    for name, info in own_nodes(comfy.registry).items():
        assert info["search_aliases"], name


def test_who_looks_for_raylight_finds_the_nodes_to_begin_with(comfy):
    own = own_nodes(comfy.registry)
    found = {name for name, info in own.items() if "raylight" in info["search_aliases"]}
    assert {"ParallelModel", "ParallelSampler", "StrategySelector"} <= found


def test_the_docs_compare_the_pack_with_comfyuis_own_node_by_its_name(comfy):
    stock = comfy.registry["MultiGPU_WorkUnits"]["display_name"]
    assert f"| | {stock} | this pack |" in (ROOT / "docs" / "selector.md").read_text("utf-8")


@pytest.mark.parametrize("language", ["en", "es", "zh"])
def test_comfyui_serves_the_locale(comfy, language):
    with urllib.request.urlopen(f"{comfy.server.url}/i18n", timeout=30) as answer:
        served = json.load(answer)[language]
    folder = ROOT / "locales" / language
    for name, texts in json.loads((folder / "nodeDefs.json").read_text("utf-8")).items():
        assert served["nodeDefs"][name] == texts
    categories = json.loads((folder / "main.json").read_text("utf-8"))["nodeCategories"]
    assert served["nodeCategories"] == categories
    assert set(categories) == {node["category"] for node in own_nodes(comfy.registry).values()}


@pytest.mark.parametrize("file", ["{}.md", "{}/es.md", "{}/zh.md"])
def test_comfyui_serves_each_help_page_where_its_page_looks(measuring, file):
    """The page requests /extensions/<pack>/docs/<node>/<language>.md, then /extensions/<pack>/docs/<node>.md."""
    comfy = measuring[0]
    for name, info in own_nodes(comfy.registry).items():
        pack = info["python_module"].split(".")[1]
        url = f"{comfy.server.url}/extensions/{pack}/docs/{file.format(name)}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            assert "text/html" not in answer.headers["content-type"]  # the page treats HTML as an error
            assert answer.read() == (ROOT / "web" / "docs" / file.format(name)).read_bytes()
