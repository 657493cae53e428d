"""A prompt of ComfyUI as data: its links, and what they lead to, without running anything."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePath
from typing import Any

Prompt = Mapping[str, Mapping[str, Any]]  # as ComfyUI runs it: by id, {"class_type", "inputs"}

# Nodes that name a model for the ranks.
LOADERS = ("ParallelModel", "ParallelModelLoader", "ParallelFluxLoader", "ParallelDemoLoader")
ENCODER = "ParallelCLIP"  # gives what it is given: a CLIP, CLIP_VISION or AUDIO_ENCODER


def links(inputs: Mapping[str, Any]) -> Iterable[tuple[str, str, int]]:
    """(input, id of the node that gives it, which of its outputs) of a node's inputs."""
    for name, value in inputs.items():
        if isinstance(value, list) and len(value) == 2 and isinstance(value[1], int):
            yield name, str(value[0]), value[1]


def needed(prompt: Prompt, outputs: Iterable[str]) -> list[str]:
    """The nodes that have to run for `outputs`, in the order of the prompt."""
    found, waiting = set(), list(outputs)
    while waiting:
        node = waiting.pop()
        if node in prompt and node not in found:
            found.add(node)
            waiting += [origin for _, origin, _ in links(prompt[node]["inputs"])]
    return [node for node in prompt if node in found]


def ancestry(prompt: Prompt, node: str) -> str:
    """Returns a digest of a node and all that leads to it: equal where ComfyUI computes it once for two prompts."""
    found: dict[str, str] = {}

    def digest(one: str) -> str:
        if one not in found:
            found[one] = ""  # of a circle, which ComfyUI refuses
            inputs: dict[str, Any] = dict(inputs_of(prompt, one))
            inputs |= {name: [digest(origin), slot] for name, origin, slot in links(inputs)}
            text = json.dumps([prompt.get(one, {}).get("class_type"), inputs], sort_keys=True, default=str)
            found[one] = hashlib.sha256(text.encode()).hexdigest()
        return found[one]

    return digest(node)


def value_of(prompt: Prompt, node: str, name: str) -> object:
    """An input's value, also where a node gives it that only holds one; None where a node has to run for it."""
    value = inputs_of(prompt, node).get(name)
    found = {link: origin for link, origin, _ in links({name: value})}
    if name not in found:
        return value
    origin = found[name]
    kind = str(prompt.get(origin, {}).get("class_type", ""))
    held = inputs_of(prompt, origin).get("value") if kind.startswith("Primitive") else None
    return held if isinstance(held, (bool, int, str)) else None


def source_of(prompt: Prompt, node: str) -> tuple[str, Mapping[str, Any]]:
    """(class, inputs) of the loader in front of a Parallel Model, past nodes that change its MODEL; else ("", {})."""
    for one in with_those_before(prompt, node, "model"):
        inputs = inputs_of(prompt, one)
        if not isinstance(inputs.get("model"), list):
            return str(prompt[one].get("class_type", "")), inputs
    return "", {}


def names_file(prompt: Prompt, file: str) -> bool:
    """Returns True if a loader for the ranks, or the one in front of a Parallel Model, names a file of this name."""
    loaders = [node for node, one in prompt.items() if one.get("class_type") in LOADERS]
    values = [
        *(value for node in loaders for value in inputs_of(prompt, node).values()),
        *(value for node in loaders for value in source_of(prompt, node)[1].values()),
    ]
    return any(isinstance(value, str) and PurePath(value).name == file for value in values)


def with_those_before(prompt: Prompt, node: str, name: str) -> Iterator[str]:
    """Yields a node, the one that gives its input `name`, and so on, each once."""
    seen: set[str] = set()
    while node in prompt and node not in seen:
        seen.add(node)
        yield node
        node = next((origin for link, origin, _ in links(inputs_of(prompt, node)) if link == name), "")


def inputs_of(prompt: Prompt, node: str) -> Mapping[str, Any]:
    found = prompt.get(node)
    inputs = found.get("inputs") if isinstance(found, Mapping) else None
    return inputs if isinstance(inputs, Mapping) else {}
