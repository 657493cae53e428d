"""Encodes the next waiting prompt's texts while the devices that hold its text encoder are idle."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

import nodes

from ...parallel_backend.errors import Cancelled, ParallelError
from ...parallel_backend.sidecar import pool
from ...parallel_backend.sidecar.group.lease import State
from ..host.prompt_graph import ENCODER, Prompt, ancestry, inputs_of, links, needed
from ..host.prompt_links import clip_before, current_node
from ..job.encoder import EarlyEncoder, NotNow, idle_holder, patcher_given_by, stand_in_of

log = logging.getLogger(__name__)
# CLIPs of earlier prompts, by `ancestry` of their node.
_made: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def remember(clip: Any) -> None:
    """Stores a weak reference to the CLIP that the running node gives. ComfyUI's cache gives the same CLIP to later
    prompts in which nothing before that node has changed."""
    current = current_node()
    if current is not None:
        _made[ancestry(*current)] = clip


class NextTexts:
    """The texts of a waiting prompt. `item`: its entry in ComfyUI's queue; `is_gone()`: True once it left the queue."""

    def __init__(self, item: tuple[Any, ...], is_gone: Callable[[], bool]) -> None:
        _, self.prompt_id, self._prompt, _, outputs, *_ = item
        self._is_gone = is_gone
        self._left = [
            node
            for node in needed(self._prompt, outputs)
            if _gives(_kind(self._prompt, node)) == {"CONDITIONING"}
        ]
        self._clips: dict[str, Any] = {}  # by node

    def encode(self, *, in_tail: bool) -> None:
        """Encodes the next text if that is possible now; call it again for the rest. `in_tail`: True if the running
        prompt will not use the devices any more. If False, only devices that are idle while others compute are used."""
        if not self._left:
            return
        try:
            self._run(self._left[0], in_tail)
        except (NotNow, Cancelled):
            if not self._is_gone():
                return
        except ParallelError as error:
            log.info("parallel sampling: a waiting prompt's text waits for its prompt: %s", error)
        except Exception:  # a malformed prompt fails with a message when it runs
            log.debug("parallel sampling: a waiting prompt's text is not known", exc_info=True)
        self._left.pop(0)

    def _run(self, node: str, in_tail: bool) -> Any:
        """Returns a node's first output. Raises LookupError if only a run of the prompt can give it."""
        kind, inputs = _kind(self._prompt, node), dict(inputs_of(self._prompt, node))
        for name, origin, slot in links(inputs):
            inputs[name] = self._clip(origin, slot, in_tail)
        with torch.inference_mode():
            return _execute(kind, inputs)

    def _clip(self, node: str, slot: int, in_tail: bool) -> Any:
        if self._prompt[node]["class_type"] != ENCODER:
            if slot or _gives(_kind(self._prompt, node)) != {"CLIP"}:
                return self._clip_given_before(node, slot, in_tail)
            return self._run(node, in_tail)
        clip = _made.get(ancestry(self._prompt, node))
        if clip is None:
            raise LookupError(node)
        holder = idle_holder(clip.patcher.encoder.number)
        others = [one for one in pool.all_sidecars() if one is not holder]
        if holder is None or not (in_tail or any(one.state is State.RUNNING for one in others)):
            raise NotNow  # others that run compute for the running prompt
        if node not in self._clips:
            encoder = EarlyEncoder(clip.patcher, self._is_gone)
            self._clips[node] = _without_manager(stand_in_of(clip, encoder))
        return self._clips[node]

    def _clip_given_before(self, node: str, slot: int, in_tail: bool) -> Any:
        """Returns the CLIP of a node that is not run here, such as a LoRA loader, with the patches that it gave to an
        earlier prompt's CLIP. If the node then gives another CLIP, the prompt encodes the text again."""
        before = clip_before(self._prompt, node)
        patcher = patcher_given_by(self._prompt, node, slot)
        if before is None or patcher is None:
            raise LookupError(node)
        found = self._clip(*before, in_tail).clone()
        found.patcher = found.patcher.encoder.patcher_of(patcher)
        return found


def _without_manager(clip: Any) -> Any:
    """Makes a CLIP and its clones bypass ComfyUI's memory manager, which belongs to the running prompt's thread."""
    clone = clip.clone
    clip.load_model = lambda *_, **__: (clip.patcher.partially_load(), clip.patcher)[1]
    clip.clone = lambda *args, **kwargs: _without_manager(clone(*args, **kwargs))
    return clip


def _kind(prompt: Prompt, node: str) -> Any:
    """Returns the class of one of ComfyUI's own nodes, None for any other node."""
    kind = nodes.NODE_CLASS_MAPPINGS.get(prompt[node]["class_type"])
    module = getattr(kind, "__module__", "")
    return kind if module == "nodes" or module.startswith("comfy_extras.") else None


def _gives(kind: Any) -> set[str]:
    return set(getattr(kind, "RETURN_TYPES", ()))


def _execute(kind: Any, inputs: Mapping[str, Any]) -> Any:
    """Runs a node and returns its first output."""
    if hasattr(kind, "define_schema"):
        return kind.execute(**inputs).args[0]
    return getattr(kind(), kind.FUNCTION)(**inputs)[0]
