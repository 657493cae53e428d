"""The sentences of web/said.json: the sources contain each of them, and each translation has the same placeholders."""

import ast
import json
import re

from comfy_harness import ROOT
from pages import locale, words_of

SAID = json.loads((ROOT / "web" / "said.json").read_text("utf-8"))
NAMES = re.compile(r"\{(\w+)\}")
LEAST = 3  # letters; a text in the sources with fewer is no sentence
# Sentences that only join other texts, so that no source contains them.
JOINED = {
    "{strategy}: {count} steps in {time} s, median {median} s",
    "{a} · {b}",
    "{a}; {b}",
    "{a}: {b}",
    "{a}, {b}",
}


def _text(node: ast.AST) -> str:
    """Returns the text of a string, with {} where a value is inserted; "" for any other node."""
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_text, node.values))
    if isinstance(node, ast.FormattedValue):
        return "{}"
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _python() -> list[list[str]]:
    """Returns the texts of each string, split where a value is inserted."""
    paths = [path for folder in ("nodes", "parallel_backend") for path in (ROOT / folder).rglob("*.py")]
    nodes = (node for path in paths for node in ast.walk(ast.parse(path.read_text("utf-8"))))
    return [re.split(r"\{\w*\}", text) for text in map(_text, nodes) if text]


def _page() -> list[list[str]]:
    found = []
    for path in (ROOT / "web").rglob("*.js"):
        text = path.read_text("utf-8")
        found += [[line] for line in re.findall(r'"((?:[^"\\\n]|\\.)*)"', text)]
        found += [
            re.split(r"\$\{(?:[^{}]|\{[^{}]*\}|`[^`]*`)*\}", line)
            for whole in re.findall(r"`((?:[^`\\]|\\.)*)`", text)
            for line in whole.splitlines()
        ]
    return found


def _letters(text: str) -> int:
    return sum(map(str.isalpha, text))


class Sources:
    """The texts in the pack's sources, in which sentences are searched."""

    def __init__(self) -> None:
        texts = {tuple(parts) for parts in _python() + _page() if _letters("".join(parts)) >= LEAST}
        self._whole = [
            (_letters("".join(parts)), re.compile(".*".join(re.escape(p.strip("\n")) for p in parts) + " ?"))
            for parts in texts
        ]
        self._parts = {part for parts in texts for part in parts}

    def say(self, sentence: str) -> bool:
        """Returns True if one string gives the sentence, or each part of it, up to a comma or the like, is in one."""
        least = _letters(NAMES.sub("", sentence)) / 2  # else a string of mostly values matches anything
        filled = NAMES.sub("7", sentence)
        if any(n >= least and whole.fullmatch(filled) for n, whole in self._whole):
            return True
        parts = [part.strip(" .") for part in re.split(r"\{\w+\}|[,;:/()]", sentence)]
        return all(any(part in said for said in self._parts) for part in parts if part)


def test_each_sentence_is_said_somewhere():
    sources = Sources()
    assert not sources.say("the processes are fast asleep"), "a sentence that nobody says is found"
    assert {english for english, *_ in SAID["said"] if not sources.say(english)} <= JOINED


def test_each_language_says_each_sentence_once_with_the_same_things_in_it():
    english = [sentence for sentence, *_ in SAID["said"]]
    assert len(english) == len(set(english)) and SAID["languages"] == ["es", "zh"]
    for sentence, *others in SAID["said"]:
        assert len(others) == 2
        for other in others:
            assert sorted(NAMES.findall(other)) == sorted(NAMES.findall(sentence)), other
            assert other != sentence or sentence.startswith("{a}"), other


def test_each_word_and_each_command_in_the_locales_is_one_of_the_page():
    """An entry that no script uses belongs to a feature that was removed, and must be removed as well."""
    script = "".join(path.read_text("utf-8") for path in (ROOT / "web").rglob("*.js"))
    assert [name for name in words_of() if f'"{name}"' not in script] == []
    commands = [name.replace("_", ".", 2).replace(".", "_", 1) for name in locale("en", "commands")]
    assert [name for name in commands if f'"{name}"' not in script] == []


def test_the_line_of_a_measured_strategy_is_said_in_each_language():
    """The list has the report's whole sentence, and the text that is inserted for {times}."""
    english = {sentence for sentence, *_ in SAID["said"]}
    whole = "{strategy}: measured before, a step takes {times}"
    assert {whole, f"{whole}, and the rule (CFG, then Ulysses) stands", "one device {n} s"} <= english
