"""Finds the nodes of a prompt that use the ranks. Once all have run, the ranks are idle: its tail."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from ..host.prompt_graph import ENCODER, LOADERS, Prompt, links, needed

TypesOf = Callable[[str], tuple[str, ...]]  # gives the types of a node class's outputs; () if unknown

# Nodes that use the ranks without a diffusion model, or give a text encoder that uses them.
WITHOUT_A_MODEL = ("ParallelVAEDecode", "ParallelVAEEncode", ENCODER)
_ENCODERS = (("CLIP",), ("CLIP_VISION",), ("AUDIO_ENCODER",))
# Link types that never carry a model of the ranks. Any other may: packs define types of their own.
_NO_MODEL = frozenset(
    (
        *(
            "LATENT",
            "IMAGE",
            "MASK",
            "VIDEO",
            "AUDIO",
            "CLIP",
            "CLIP_VISION",
            "VAE",
            "CONTROL_NET",
            "CONDITIONING",
        ),
        *("SIGMAS", "NOISE", "STRING", "INT", "FLOAT", "BOOLEAN", "COMBO", "PARALLEL_STRATEGY"),
    )
)


def nodes_on_ranks(prompt: Prompt, outputs: Iterable[str], types_of: TypesOf) -> set[str]:
    """Returns the needed nodes that use the ranks or may: all that a model or text encoder of the ranks reaches."""
    nodes = needed(prompt, outputs)
    found = {n for n in nodes if prompt[n]["class_type"] in (*LOADERS, *WITHOUT_A_MODEL)}
    while more := {n for n in nodes if n not in found and found & set(_models(prompt, n, types_of))}:
        found |= more
    encoders = {n for n in nodes if prompt[n]["class_type"] == ENCODER}
    while more := {n for n in nodes if n not in encoders and encoders & set(_encoders(prompt, n, types_of))}:
        encoders |= more
    return found | encoders


def loaders(prompt: Prompt, outputs: Iterable[str], types_of: TypesOf) -> list[str]:
    """Returns the needed loaders whose model is used; others may be needed only for a text encoder or VAE."""
    nodes = needed(prompt, outputs)
    used = {origin for node in nodes for origin in _models(prompt, node, types_of)}
    return [node for node in nodes if node in used and prompt[node]["class_type"] in LOADERS]


def _encoders(prompt: Prompt, node: str, types_of: TypesOf) -> Iterator[str]:
    """Yields the nodes that give this one a text encoder."""
    for _, origin, slot in links(prompt[node]["inputs"]):
        kind = prompt[origin]["class_type"] if origin in prompt else ""
        if kind == ENCODER or types_of(kind)[slot : slot + 1] in _ENCODERS:
            yield origin


def _models(prompt: Prompt, node: str, types_of: TypesOf) -> Iterator[str]:
    """Yields the nodes that give this one an output that may carry a model."""
    for _, origin, slot in links(prompt[node]["inputs"]):
        kind = prompt[origin]["class_type"] if origin in prompt else ""
        types = types_of(kind)
        if kind not in WITHOUT_A_MODEL and (slot >= len(types) or types[slot] not in _NO_MODEL):
            yield origin


def in_tail(prompt: Prompt, on_ranks: set[str], started: set[str], finished: set[str]) -> bool:
    """Returns True if none of the nodes `on_ranks` will run any more. A node that has not run will not run either if a
    node that takes its output has started: ComfyUI had the output in its cache."""
    done = set(finished)
    waiting = list(started | finished)
    while waiting:
        for _, origin, _ in links(prompt[waiting.pop()]["inputs"]):
            if origin in prompt and origin not in done:
                done.add(origin)
                waiting.append(origin)
    return on_ranks <= done
