"""The nodes of a prompt that use the ranks. When all of them have run, it is in its tail, and the ranks are idle."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

Prompt = Mapping[str, Mapping[str, Any]]  # as ComfyUI runs it: by id, {"class_type", "inputs"}
TypesOf = Callable[[str], tuple[str, ...]]  # of a node class's outputs; of one that nobody knows, none

# Nodes that name a model for the ranks, and those that use ranks without one.
LOADERS = ("ParallelModel", "ParallelModelLoader", "ParallelFluxLoader", "ParallelDemoLoader")
WITHOUT_A_MODEL = ("ParallelVAEDecode",)
# Links on which no model of the ranks travels. Any other may: packs have types of their own.
_PICTURES = (
    "LATENT",
    "IMAGE",
    "MASK",
    "VIDEO",
    "AUDIO",
    "CLIP_VISION",
    "VAE",
    "CONTROL_NET",
    "CONDITIONING",
    "CLIP",
)
_VALUES = ("SIGMAS", "NOISE", "STRING", "INT", "FLOAT", "BOOLEAN", "COMBO", "PARALLEL_STRATEGY")
_NO_MODEL = frozenset((*_PICTURES, *_VALUES))


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


def loaders(prompt: Prompt, outputs: Iterable[str]) -> list[str]:
    """Of the needed nodes, those that name a model for the ranks."""
    return [node for node in needed(prompt, outputs) if prompt[node]["class_type"] in LOADERS]


def nodes_on_ranks(prompt: Prompt, outputs: Iterable[str], types_of: TypesOf) -> set[str]:
    """Of the needed nodes, those that use the ranks or may: all that a model of theirs reaches."""
    nodes = needed(prompt, outputs)
    found = {n for n in nodes if prompt[n]["class_type"] in (*LOADERS, *WITHOUT_A_MODEL)}

    def takes_a_model(node: str) -> bool:
        for _, origin, slot in links(prompt[node]["inputs"]):
            if origin in found and prompt[origin]["class_type"] not in WITHOUT_A_MODEL:
                types = types_of(prompt[origin]["class_type"])
                if slot >= len(types) or types[slot] not in _NO_MODEL:
                    return True
        return False

    while more := {node for node in nodes if node not in found and takes_a_model(node)}:
        found |= more
    return found
