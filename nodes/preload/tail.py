"""Finds the nodes of a prompt that use the ranks. Once all have run, the ranks are idle: its tail."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from ..host.prompt_graph import ENCODER, LOADERS, Prompt, class_of, links, needed
from ..host.prompt_links import type_of

# Nodes that use the ranks without a diffusion model, or give a text encoder that uses them.
WITHOUT_A_MODEL = ("ParallelVAEDecode", "ParallelVAEEncode", ENCODER)
_ENCODERS = ("CLIP", "CLIP_VISION", "AUDIO_ENCODER")
# Link types that never carry a model of the ranks. Any other may: packs define types of their own.
_NO_MODEL = frozenset(
    {"LATENT", "IMAGE", "MASK", "VIDEO", "AUDIO", "CLIP", "CLIP_VISION", "VAE", "CONTROL_NET", "CONDITIONING"}
    | {"SIGMAS", "NOISE", "STRING", "INT", "FLOAT", "BOOLEAN", "COMBO", "PARALLEL_STRATEGY"}
)


def nodes_on_ranks(prompt: Prompt, outputs: Iterable[str]) -> set[str]:
    """Returns the needed nodes that use the ranks or may: all that a model or text encoder of the ranks reaches."""
    nodes = needed(prompt, outputs)

    def reached(kinds: tuple[str, ...], passes: Callable[[str, str | None], bool]) -> set[str]:
        found = {n for n in nodes if prompt[n]["class_type"] in kinds}
        while more := {n for n in nodes if n not in found and found & set(_givers(prompt, n, passes))}:
            found |= more
        return found

    of_encoders = reached((ENCODER,), lambda kind, output: kind == ENCODER or output in _ENCODERS)
    return reached((*LOADERS, *WITHOUT_A_MODEL), _may_be_model) | of_encoders


def loaders(prompt: Prompt, outputs: Iterable[str]) -> list[str]:
    """Returns the needed loaders whose model is used; others may be needed only for a text encoder or VAE."""
    nodes = needed(prompt, outputs)
    used = {origin for node in nodes for origin in _givers(prompt, node, _may_be_model)}
    return [node for node in nodes if node in used and prompt[node]["class_type"] in LOADERS]


def _givers(prompt: Prompt, node: str, passes: Callable[[str, str | None], bool]) -> Iterator[str]:
    """Yields the nodes that give this one an output for whose node class and type `passes` is true."""
    for _, origin, slot in links(prompt[node]["inputs"]):
        if passes(class_of(prompt, origin), type_of(prompt, origin, slot)):
            yield origin


def _may_be_model(kind: str, output: str | None) -> bool:
    return kind not in WITHOUT_A_MODEL and output not in _NO_MODEL


def in_tail(prompt: Prompt, on_ranks: set[str], started: set[str], finished: set[str]) -> bool:
    """Returns True if none of the nodes `on_ranks` will run any more. A node that has not run will not run either if a
    node that takes its output has started: ComfyUI had the output in its cache."""
    origins = (origin for node in started | finished for _, origin, _ in links(prompt[node]["inputs"]))
    return on_ranks <= finished.union(needed(prompt, origins))
