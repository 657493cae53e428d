"""The help pages in other languages have the same content as the English ones and use the labels of their language.

ComfyUI shows ``<node>/<language>.md`` if it exists, and ``<node>.md`` otherwise.
"""

import json
import re
from collections import Counter

import pytest

from comfy_harness import ROOT
from pages import locale, words_of

PAGES = ROOT / "web" / "docs"
LANGUAGES = sorted({path.name for path in (ROOT / "locales").iterdir()} - {"en"})
ENGLISH = {path.stem: path.read_text("utf-8") for path in sorted(PAGES.glob("*.md"))}
EACH = [(name, language) for name in ENGLISH for language in LANGUAGES]
# Translations of the placeholders in code.
PLACEHOLDERS = {"NAME": {"es": "NOMBRE", "zh": "名称"}}
SECTIONS = {
    "Inputs": {"es": "Entradas", "zh": "输入"},
    "Outputs": {"es": "Salidas", "zh": "输出"},
    "Example": {"es": "Ejemplo", "zh": "示例"},
    "Examples": {"es": "Ejemplos", "zh": "示例"},
    "Limits": {"es": "Límites", "zh": "限制"},
    "The panel under the node": {"es": "El panel debajo del nodo", "zh": "节点下方的面板"},
}
# Labels of buttons: web/said.json translates SAID, locales/<language>/main.json the entries SHOWN.
SAID = ("Apply", "Run the GPU check")
SHOWN = ("prove", "preload", "timeline", "swap")


def _page(name: str, language: str) -> str:
    return (PAGES / name / f"{language}.md").read_text("utf-8")


def _labels(language: str) -> dict[str, str]:
    """Returns the labels of all inputs, outputs and placeholders, by name."""
    labels = {name: words[language] for name, words in PLACEHOLDERS.items()}
    translated = locale(language, "nodeDefs")
    for name, node in locale("en", "nodeDefs").items():
        ours = translated[name]
        named = [(key, ours["inputs"][key]["name"]) for key in node["inputs"]]
        named += [(one["name"], ours["outputs"][key]["name"]) for key, one in node["outputs"].items()]
        for key, label in named:
            assert labels.setdefault(key, label) == label, (name, key)  # one label for one name
    return labels


def _headings(page: str) -> list[tuple[str, str]]:
    return re.findall(r"^(#+) (.+)$", page, re.MULTILINE)


def _code(page: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", page)


def _form(page: str) -> tuple:
    """Returns what a translation keeps: cells in each line of the tables, links, list items and paragraphs."""
    cells = [line.count(" | ") for line in page.splitlines() if line.startswith("|")]
    links = re.findall(r"\]\(([^)\s]+)\)", page)
    return cells, links, page.count("\n- "), len(re.findall(r"\n{2,}", page))


def _sentences(page: str) -> set[str]:
    """Returns the texts of more than three words; shorter ones may be names, such as *Save Image*."""
    sentences = re.split(r"[.:;|]\s|\n\n|\n(?=[|#-])", page)
    return {
        words
        for sentence in sentences
        if len((words := " ".join(sentence.strip("|#- \n").split())).split()) > 3
    }


def _numbers(page: str) -> Counter[str]:
    return Counter(re.findall(r"\d+(?:\.\d+)?", page))


def test_every_help_page_is_in_every_language_and_no_other():
    there = {(path.parent.name, path.stem) for path in PAGES.glob("*/*")}
    assert there == set(EACH) and all(path.suffix == ".md" for path in PAGES.glob("*/*"))


@pytest.mark.parametrize(("name", "language"), EACH)
def test_a_translated_page_has_the_headings_tables_and_links_of_the_english_one(name, language):
    english, page = ENGLISH[name], _page(name, language)
    title, *sections = _headings(english)
    expected = [(title[0], locale(language, "nodeDefs")[name]["display_name"])]
    expected += [(level, SECTIONS[words][language]) for level, words in sections]
    assert _headings(page) == expected
    assert _form(page) == _form(english)
    assert _numbers(page) >= _numbers(english)


@pytest.mark.parametrize(("name", "language"), EACH)
def test_a_translated_page_calls_inputs_and_outputs_as_they_are_labelled_and_keeps_other_code(name, language):
    labels = _labels(language)
    expected = [
        re.sub(r"^\w+(?=: )|^\w+$|(?<=:)[A-Z]+$", lambda word: labels.get(word[0], word[0]), code)
        for code in _code(ENGLISH[name])
    ]
    assert Counter(_code(_page(name, language))) == Counter(expected)
    # The tables also keep the node's order.
    first = re.compile(r"^\| `([^`]+)` \|", re.MULTILINE)
    assert first.findall(_page(name, language)) == [labels[one] for one in first.findall(ENGLISH[name])]


@pytest.mark.parametrize(("name", "language"), EACH)
def test_a_translated_page_calls_nodes_templates_and_buttons_as_they_are_shown(name, language):
    english = " ".join(ENGLISH[name].split())
    page = " ".join(_page(name, language).split())
    ours = locale(language, "nodeDefs")
    nodes = {node["display_name"]: ours[key] for key, node in locale("en", "nodeDefs").items()}
    for node in re.findall("|".join(sorted(nodes, key=len, reverse=True)), english):
        assert nodes[node]["display_name"].lower() in page.lower()
        assert node not in page
    for template in re.findall(r"\*([^*]+)\* in the Templates", english):
        assert f"*{template}*" in page
    for key in SHOWN:
        assert page.count(f"*{words_of(language)[key]}*") == english.count(f"*{words_of()[key]}*"), key
    said = json.loads((ROOT / "web" / "said.json").read_text("utf-8"))
    shown_as = {one[0]: one[1 + said["languages"].index(language)] for one in said["said"]}
    for one in SAID:
        sentence = shown_as.get(one) or shown_as[f"{one} {{words}}"].split("{")[0].strip()
        assert page.count(f"*{sentence}*") == english.count(f"*{one}*"), one


@pytest.mark.parametrize(("name", "language"), EACH)
def test_no_text_of_a_translated_page_is_left_english(name, language):
    page = _page(name, language)
    assert not _sentences(ENGLISH[name]) & _sentences(page)
    # Names of templates and captions for the demo model stay English, and so does code.
    words = re.sub(r"`[^`]*`|\*[^*]+\*", "", page)
    assert not re.findall(r"\b(?:the|and|with|which|are|from|that|on|of)\b", words)
