"""Help pages and locales name every node, input and output, and nothing else.

They are compared with the English locale, and tests/comfy/test_nodes.py compares that with the schemas.
"""

import re

import pytest

from comfy_harness import ROOT
from pages import locale

PAGES = ROOT / "web" / "docs"
TRANSLATED = ("es", "zh")
# Characters that have a special meaning in vue-i18n, which shows the texts.
SYNTAX = re.compile(r"[{}@|]")


ENGLISH = locale("en", "nodeDefs")
NODES = sorted(ENGLISH)


def _texts(node: dict) -> dict[tuple[str, ...], str]:
    """Returns every text of a node by its path, such as ("inputs", "seed", "tooltip")."""
    texts = {(key,): node[key] for key in ("display_name", "description")}
    for group in ("inputs", "outputs"):
        for name, entry in node[group].items():
            texts |= {(group, name, key): text for key, text in entry.items()}
    return texts


def _tables(page: str) -> dict[str, list[str]]:
    """Returns the names in the first column of each table, by its heading, such as "Inputs" and "Outputs"."""
    return {
        title: re.findall(r"^\| `(\w+)` \|", part, re.MULTILINE)
        for title, part in re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    }


def test_every_language_has_every_file():
    english = {path.name for path in (ROOT / "locales" / "en").iterdir()}
    assert {path.name for path in (ROOT / "locales").iterdir()} == {"en", *TRANSLATED}
    for language in TRANSLATED:
        assert {path.name for path in (ROOT / "locales" / language).iterdir()} == english


@pytest.mark.parametrize("language", ["en", *TRANSLATED])
def test_a_locale_has_every_node_input_and_output_and_no_other(language):
    ours = locale(language, "nodeDefs")
    assert sorted(ours) == NODES
    for name, node in ours.items():
        texts = _texts(node)
        assert texts.keys() == _texts(ENGLISH[name]).keys(), name
        for place, text in texts.items():
            assert text.strip() and not SYNTAX.search(text), (name, place, text)


@pytest.mark.parametrize("language", TRANSLATED)
def test_a_translation_leaves_no_english_sentence(language):
    ours = locale(language, "nodeDefs")
    assert len({node["display_name"] for node in ours.values()}) == len(NODES)
    for name, node in ours.items():
        english = _texts(ENGLISH[name])
        for place, text in _texts(node).items():
            if place[-1] != "name":
                assert text != english[place], (name, place)


@pytest.mark.parametrize("language", ["en", *TRANSLATED])
def test_a_text_on_files_names_both_folders_of_diffusion_models(language):
    """ComfyUI's folder of diffusion models is two on disk."""
    pages = [PAGES / f"{name}.md" if language == "en" else PAGES / name / f"{language}.md" for name in NODES]
    texts = [text for node in locale(language, "nodeDefs").values() for text in _texts(node).values()]
    lines = [line for page in pages for line in page.read_text("utf-8").splitlines()]
    naming = [text for text in texts + lines if "models/diffusion_models" in text]
    assert len(naming) == 4 and all("models/unet" in text for text in naming)


@pytest.mark.parametrize("language", TRANSLATED)
def test_a_translation_keeps_the_values_that_a_user_types(language):
    """Values that a user types or chooses from a list, such as all, 0,1,3 and cpu:2, are not translated."""
    ours = locale(language, "nodeDefs")
    for name, inputs, words in [
        ("StrategySelector", "devices", ["all", "0,1,3", "cpu:2"]),
        ("StrategySelector", "device_shares", ["24,16", "memory"]),
        ("StrategySelector", "approximation", ["never", "if_needed", "allowed"]),
        ("StrategySelector", "mode", ["auto", "manual"]),
        ("ParallelFluxLoader", "weight_dtype", ["auto", "float8_e4m3fn", "bfloat16"]),
    ]:
        for word in words:
            assert word in ENGLISH[name]["inputs"][inputs]["tooltip"]
            assert word in ours[name]["inputs"][inputs]["tooltip"], (language, name, inputs, word)


def test_there_is_a_help_page_for_each_node_and_no_other():
    assert sorted(path.stem for path in PAGES.glob("*.md")) == NODES


@pytest.mark.parametrize("name", NODES)
def test_a_help_page_names_each_input_and_output_and_no_other(name):
    page = (PAGES / f"{name}.md").read_text("utf-8")
    node = ENGLISH[name]
    tables = _tables(page)
    assert page.startswith(f"# {node['display_name']}\n")
    assert tables["Inputs"] == [name for name in node["inputs"] if name != "control_after_generate"]
    assert tables["Outputs"] == [output["name"] for output in node["outputs"].values()]
    assert {"Example", "Examples"} & tables.keys() and "Limits" in tables


def test_help_pages_show_pictures_that_are_there_and_workflows_that_exist():
    pages = {path.stem: path.read_text("utf-8") for path in PAGES.glob("*.md")}
    pictures = [link for page in pages.values() for link in re.findall(r"\]\((?!https?:)([^)]+)\)", page)]
    held = (path.name for path in PAGES.iterdir() if path.is_file() and path.suffix != ".md")
    assert sorted(pictures) == sorted(held)
    examples = {path.stem for path in (ROOT / "example_workflows").glob("*.json")}
    named = {name for page in pages.values() for name in re.findall(r"\*([^*\n]+)\* in the Templates", page)}
    assert named and named <= examples


def test_the_readme_names_every_node_and_every_example():
    readme = (ROOT / "README.md").read_text("utf-8")
    nodes = re.findall(r"^\| \*\*([\w ]+)\*\* \|", readme, re.MULTILINE)
    assert sorted(nodes) == sorted(node["display_name"] for node in ENGLISH.values())
    _, table = readme.split("| Template |")
    rows = re.findall(r"^\| (\*.*?) \|", table.split("\n\n")[0], re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"\*([^*]+)\*", row)]
    assert sorted(named) == sorted(path.stem for path in (ROOT / "example_workflows").glob("*.json"))
