"""A ComfyUI prompt as data: its links and the nodes that they lead to. Runs nothing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import PurePath
from typing import Any

Prompt = Mapping[str, Mapping[str, Any]]  # ComfyUI's own format: {node id: {"class_type", "inputs"}}

# Nodes that name a model for the ranks.
LOADERS = ("ParallelModel", "ParallelModelLoader", "ParallelFluxLoader", "ParallelDemoLoader")
ENCODER = "ParallelCLIP"  # its output has its input's type: CLIP, CLIP_VISION or AUDIO_ENCODER


def links(inputs: Mapping[str, Any]) -> Iterable[tuple[str, str, int]]:
    """Yields (input name, id of the source node, index of its output) for each linked input of a node."""
    for name, value in inputs.items():
        if isinstance(value, list) and len(value) == 2 and isinstance(value[1], int):
            yield name, str(value[0]), value[1]


def needed(prompt: Prompt, outputs: Iterable[str]) -> list[str]:
    """Returns the nodes that have to run for `outputs`, in the order of the prompt."""
    found, waiting = set(), list(outputs)
    while waiting:
        node = waiting.pop()
        if node in prompt and node not in found:
            found.add(node)
            waiting += [origin for _, origin, _ in links(prompt[node]["inputs"])]
    return [node for node in prompt if node in found]


def ancestry(prompt: Prompt, node: str) -> str:
    """Returns a digest of a node and all nodes before it. If two prompts have the same, ComfyUI runs the node once."""
    found: dict[str, str] = {}

    def digest(one: str) -> str:
        if one not in found:
            found[one] = ""  # ends a cycle, which ComfyUI refuses
            inputs: dict[str, Any] = dict(inputs_of(prompt, one))
            inputs |= {name: [digest(origin), slot] for name, origin, slot in links(inputs)}
            text = json.dumps([prompt.get(one, {}).get("class_type"), inputs], sort_keys=True, default=str)
            found[one] = hashlib.sha256(text.encode()).hexdigest()
        return found[one]

    return digest(node)


def value_of(prompt: Prompt, node: str, name: str) -> object:
    """Returns an input's value, also from a linked Primitive node; None if a node has to run to know it."""
    value = inputs_of(prompt, node).get(name)
    origin = next((one for _, one, _ in links({name: value})), None)
    if origin is None:
        return value
    is_primitive = class_of(prompt, origin).startswith("Primitive")
    held = inputs_of(prompt, origin).get("value") if is_primitive else None
    return held if isinstance(held, (bool, int, str)) else None


def loader_before(prompt: Prompt, node: str) -> str:
    """Returns the loader before a Parallel Model, past nodes that change MODEL; "" if there is none."""
    path = with_those_before(prompt, node, "model")
    return next((one for one in path if not isinstance(inputs_of(prompt, one).get("model"), list)), "")


def class_of(prompt: Prompt, node: str) -> str:
    """Returns the name of a node's class; "" if it is unknown."""
    return str(prompt.get(node, {}).get("class_type", ""))


def names_file(prompt: Prompt, file: str) -> bool:
    """Returns True if a loader for the ranks, or the loader before a Parallel Model, names a file called `file`."""
    loaders = [node for node, one in prompt.items() if one.get("class_type") in LOADERS]
    names = {*loaders, *(loader_before(prompt, node) for node in loaders)}
    values = (value for node in names for value in inputs_of(prompt, node).values())
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
