"""Texts of waiting prompts: which are encoded ahead, when, and for which call an answer is kept."""

import weakref
from concurrent.futures import Future
from dataclasses import dataclass
from types import SimpleNamespace
from typing import ClassVar

import pytest

from graphs import Graph
from pack_nodes import module_fixture
from parallel_backend.errors import Cancelled
from parallel_backend.sidecar import pool
from parallel_backend.sidecar.group.lease import State

PROMPT = "the prompt's id"


module = module_fixture("nodes.preload.next_texts")
encoder = module_fixture("nodes.job.encoder")
next_prompt = module_fixture("nodes.preload.next_prompt")


class TextNode:
    """Stands in for ComfyUI's own node; `encoded`: the texts that were encoded, `loras`: the LoRAs of their CLIPs."""

    RETURN_TYPES, FUNCTION = ("CONDITIONING",), "encode"
    encoded: ClassVar[list[str]] = []
    loras: ClassVar[list[tuple[str, ...]]] = []

    def encode(self, clip, text):
        clip.encode(text)
        self.encoded.append(text)
        return (text,)


class SkipNode:
    RETURN_TYPES, FUNCTION = ("CLIP",), "skip"

    def skip(self, clip):
        return (clip,)


class LoraNode:
    RETURN_TYPES, FUNCTION = ("MODEL", "CLIP"), "load"


class CombineNode:
    RETURN_TYPES, FUNCTION = ("CONDITIONING",), "combine"

    def combine(self, one, other):
        TextNode.encoded.append("combined")
        return (one,)


class PackNode(TextNode):
    pass


TextNode.__module__ = SkipNode.__module__ = CombineNode.__module__ = "nodes"
CLASSES = {
    "CLIPTextEncode": TextNode,
    "CLIPSetLastLayer": SkipNode,
    "ConditioningCombine": CombineNode,
    "LoraOfSomePack": LoraNode,
    "TextOfSomePack": PackNode,
}


@dataclass(eq=False)
class Patcher:
    encoder: SimpleNamespace
    loras: tuple[str, ...] = ()


class Clip:
    """Stands in for the CLIP that a Parallel CLIP gave to an earlier prompt."""

    def __init__(self):
        self.patcher = Patcher(SimpleNamespace(number=7, patcher_of=lambda patcher: patcher))

    def clone(self):
        found = Clip()
        found.patcher = self.patcher
        return found

    def encode(self, text):
        if text == "busy":
            raise Cancelled("The request was cancelled before it reached the processes.")
        TextNode.loras.append(self.patcher.loras)


def sidecar(state, *numbers):
    return SimpleNamespace(state=state, held=SimpleNamespace(modules=numbers))


@pytest.fixture
def prompt(module, monkeypatch):
    """A graph whose Parallel CLIP, `clip`, gave the CLIP `made` to an earlier prompt."""
    monkeypatch.setattr(module.nodes, "NODE_CLASS_MAPPINGS", CLASSES, raising=False)
    monkeypatch.setattr(module, "EarlyEncoder", lambda encoder, is_gone: encoder)
    monkeypatch.setattr(module, "stand_in_of", lambda clip, encoder: clip)
    monkeypatch.setattr(TextNode, "encoded", [])
    monkeypatch.setattr(TextNode, "loras", [])
    graph = Graph()
    graph.clip = [graph.add("ParallelCLIP", clip=[graph.add("CLIPLoader", clip_name="a"), 0]), 0]
    made = Clip()
    monkeypatch.setattr(module, "current_node", lambda: (graph.prompt, graph.clip[0]))
    module.remember(made)
    graph.made = made
    idle(monkeypatch, sidecar(State.READY, 7))
    return graph


def texts(module, graph, is_gone=lambda: False):
    ends = [graph.add("PreviewAny", source=[node, 0]) for node in list(graph.prompt)]
    return module.NextTexts((0, PROMPT, graph.prompt, {}, ends), is_gone)


def encode_all(module, graph):
    """Encodes in the tail until no text of the graph is left."""
    found = texts(module, graph)
    for _ in graph.prompt:
        found.encode(in_tail=True)
    return found


def idle(monkeypatch, *sidecars):
    monkeypatch.setattr(pool, "all_sidecars", lambda: sidecars)


def test_in_the_tail_all_of_them_are_that_comfyuis_own_nodes_make(module, prompt):
    skipped = [prompt.add("CLIPSetLastLayer", clip=prompt.clip), 0]
    both = [
        [prompt.add("CLIPTextEncode", clip=clip, text=f"text {number}"), 0]
        for number, clip in enumerate((prompt.clip, skipped))
    ]
    prompt.add("ConditioningCombine", one=both[0], other=both[1])
    prompt.add("TextOfSomePack", clip=prompt.clip, text="of a pack")
    prompt.add("CLIPTextEncode", clip=[prompt.add("CLIPLoader", clip_name="a"), 0], text="of stock")
    other = [prompt.add("ParallelCLIP", clip=[prompt.add("CLIPLoader", clip_name="b"), 0]), 0]
    prompt.add("CLIPTextEncode", clip=other, text="of an encoder that no prompt had")
    prompt.add("CLIPTextEncode", clip=prompt.clip, text=[prompt.add("PrimitiveString"), 0])
    found = encode_all(module, prompt)
    assert TextNode.encoded == ["text 0", "text 1"] and found.prompt_id == PROMPT


def test_a_lora_is_what_its_loader_gave_to_an_earlier_prompt(module, encoder, prompt, monkeypatch):
    """The loader may be any pack's. To run it ahead would read the LoRA twice."""
    with_lora = [prompt.add("LoraOfSomePack", clip=prompt.clip, lora_name="seen"), 1]
    other = [prompt.add("LoraOfSomePack", clip=prompt.clip, lora_name="never seen"), 1]
    earlier = prompt.add("CLIPTextEncode", clip=with_lora, text="of the earlier prompt")
    prompt.add("CLIPTextEncode", clip=other, text="with a LoRA that no prompt had")
    skipped = [prompt.add("CLIPSetLastLayer", clip=with_lora), 0]
    prompt.add("CLIPTextEncode", clip=skipped, text="skipped")
    patcher = Patcher(prompt.made.patcher.encoder, ("seen",))
    monkeypatch.setattr(encoder, "current_node", lambda: (prompt.prompt, earlier))
    encoder._note_place(patcher)
    encode_all(module, prompt)
    assert TextNode.encoded == ["of the earlier prompt", "skipped"] and TextNode.loras == [("seen",)] * 2


def test_a_text_ahead_asks_comfyuis_memory_manager_for_nothing(module, prompt, monkeypatch):
    """The manager belongs to the running prompt. Nodes clone the CLIP that they get: clones must bypass it as well."""
    loaded = []
    monkeypatch.setattr(Clip, "load_model", lambda self: pytest.fail("the memory manager's"), raising=False)
    monkeypatch.setattr(Clip, "encode", lambda self, text: loaded.append(self.load_model()))
    prompt.made.patcher.partially_load = lambda: None
    monkeypatch.setattr(SkipNode, "skip", lambda self, clip: (clip.clone().clone(),))
    skipped = [prompt.add("CLIPSetLastLayer", clip=prompt.clip), 0]
    prompt.add("CLIPTextEncode", clip=skipped, text="a text")
    texts(module, prompt).encode(in_tail=True)
    assert loaded == [prompt.made.patcher]


@pytest.mark.parametrize(
    ("sidecars", "encoded"),
    [
        ([sidecar(State.READY, 7), sidecar(State.RUNNING)], True),  # the prompt samples on other devices
        ([sidecar(State.READY, 7)], False),  # the prompt may use it at any moment
        ([sidecar(State.RUNNING, 7)], False),
        ([sidecar(State.READY), sidecar(State.RUNNING)], False),  # to load the encoder takes room
    ],
)
def test_while_a_prompt_runs_only_devices_that_it_leaves_idle_are_asked(
    module, prompt, monkeypatch, sidecars, encoded
):
    idle(monkeypatch, *sidecars)
    prompt.add("CLIPTextEncode", clip=prompt.clip, text="a text")
    found = texts(module, prompt)
    found.encode(in_tail=False)
    assert TextNode.encoded == ["a text"] * encoded
    idle(monkeypatch, sidecar(State.READY, 7))
    found.encode(in_tail=True)  # a text that had to wait is tried again
    assert TextNode.encoded == ["a text"]


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_text_that_was_cancelled_goes_with_its_prompt_and_else_is_tried_again(
    module, prompt, monkeypatch, is_gone
):
    prompt.add("CLIPTextEncode", clip=prompt.clip, text="busy")
    found = texts(module, prompt, lambda: is_gone)
    found.encode(in_tail=True)
    monkeypatch.setattr(Clip, "encode", lambda self, text: None)
    found.encode(in_tail=True)
    assert TextNode.encoded == ([] if is_gone else ["busy"])


def test_a_clip_that_comfyui_has_dropped_is_not_known_any_more(module, prompt, monkeypatch):
    prompt.add("CLIPTextEncode", clip=prompt.clip, text="a text")
    prompt.made = None
    texts(module, prompt).encode(in_tail=True)
    assert TextNode.encoded == []


def test_the_text_encoder_of_a_prompt_is_held_only_while_the_prompt_waits(next_prompt, monkeypatch):
    """Else it takes memory until ComfyUI's queue is empty, though the prompt has run or was deleted."""
    running, item, other = [
        (number, name, {}, {}, []) for number, name in enumerate(("first", PROMPT, "last"))
    ]
    looks = iter([([running], [item]), ([item], []), ([running], [other]), ([running], [])])
    made, held = [], []

    class Texts:
        def __init__(self, item, is_gone):
            self.prompt_id = item[1]
            made.append(weakref.ref(self))

        def encode(self, in_tail):
            assert not in_tail

    def look_around(seconds):
        held.append([one() is not None for one in made])

    monkeypatch.setattr(next_prompt, "setting", lambda name: True)
    monkeypatch.setattr(next_prompt, "_in_tail", lambda item, on_ranks: False)
    monkeypatch.setattr(next_prompt, "NextTexts", Texts)
    monkeypatch.setattr(next_prompt, "time", SimpleNamespace(sleep=look_around))
    queue = SimpleNamespace(get_current_queue_volatile=lambda: next(looks, ([], [])))
    next_prompt.NextPrompt(queue)._watch()
    assert held == [[True], [False], [False, True], [False, False]]


def call(key):
    return SimpleNamespace(key=lambda tensors: key)


def test_an_answer_is_for_one_call_that_is_the_same(encoder):
    answers = encoder.EarlyAnswers()
    assert answers.take(call(b"a")) is None
    future, is_new = answers.begin(call(b"a"))
    assert is_new and answers.begin(call(b"a")) == (future, False)
    assert answers.take(call(b"b")) is None
    assert answers.take(call(b"a")) is future and answers.take(call(b"a")) is None
    failed, _ = answers.begin(call(b"c"))
    answers.forget(failed)
    assert answers.take(call(b"c")) is None


def test_the_oldest_answers_go_where_nobody_calls_for_them(encoder):
    answers = encoder.EarlyAnswers()
    for number in range(encoder.MOST_EARLY + 1):
        answers.begin(call(bytes([number])))
    assert answers.take(call(bytes([0]))) is None
    assert answers.take(call(bytes([encoder.MOST_EARLY]))) is not None


def test_an_answer_that_could_not_be_given_ahead_is_asked_for_again(encoder):
    ahead, failed, asked = Future(), Future(), SimpleNamespace(run=lambda: "asked for again")
    ahead.set_result("given ahead")
    failed.set_exception(Cancelled("by hand"))
    assert encoder._wait_for(ahead, asked) == "given ahead"
    assert encoder._wait_for(failed, asked) == "asked for again"
