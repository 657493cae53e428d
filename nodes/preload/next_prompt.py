"""Loads the next waiting prompt's model while the one that runs is in its tail and leaves the ranks idle."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from comfy_execution.progress import NodeState, get_progress_state

import nodes

from ...parallel_backend.errors import ParallelError
from ...parallel_backend.sidecar.group.events import Ended, Event
from ..host.prompt_graph import Prompt
from .named_model import preload
from .tail import in_tail, loaders, nodes_on_ranks

if TYPE_CHECKING:
    from execution import PromptQueue  # ComfyUI's

_LOOK_AGAIN = 0.02  # s; a small picture is decoded in twice that
_COMPUTING = ("sample", "decode", "encode")  # requests after which the tail may have begun

log = logging.getLogger(__name__)


def uses_ranks(queue: PromptQueue) -> bool:
    """Whether a prompt runs that has nodes before it, or at work, that use the ranks or may."""
    running, _ = queue.get_current_queue_volatile()
    return any((found := _on_ranks(item)) and not _in_tail(item, found) for item in running)


class NextPrompt:
    """`on_event` is a listener of events.py; a thread looks from a prompt's first request to its end."""

    def __init__(self, queue: PromptQueue, wanted: Callable[[], bool]) -> None:
        self._queue, self._wanted = queue, wanted
        self._lock = threading.Lock()
        self._watched = ""  # the prompt that a thread looks at

    def on_event(self, event: Event) -> None:
        """Starts to look, where that is wished."""
        if not (isinstance(event, Ended) and event.prompt_id and event.request in _COMPUTING):
            return
        with self._lock:
            if event.prompt_id == self._watched:
                return
            self._watched = event.prompt_id
        threading.Thread(
            target=self._watch, args=(event.prompt_id,), name="parallel-next-prompt", daemon=True
        ).start()

    def _watch(self, prompt_id: str) -> None:
        tried, on_ranks = "", None
        while True:
            running, waiting = self._queue.get_current_queue_volatile()
            item = next((item for item in running if item[1] == prompt_id), None)
            if item is None or self._watched != prompt_id:
                return
            if on_ranks is None:
                on_ranks = _on_ranks(item)
            following = min(waiting, key=lambda item: item[:2], default=None)
            is_new = following is not None and following[1] != tried
            if is_new and _in_tail(item, on_ranks) and self._wanted():
                tried = following[1]
                _preload_all(following[2], following[4])
            time.sleep(_LOOK_AGAIN)


def _preload_all(prompt: Prompt, outputs: list[str]) -> None:
    """The models of a prompt, one after the other, on ranks that run already; to start some would take cores away."""
    for node in loaders(prompt, outputs, _types_of):
        try:
            info, devices = preload(prompt, node, only_warm=True)
        except ParallelError as error:
            log.info("parallel sampling: the next prompt's model waits for its prompt: %s", error)
            return
        except Exception:  # a prompt that is not as it should be fails when it runs, and says so then
            log.warning("parallel sampling: the next prompt's model is not known", exc_info=True)
            return
        if not info.cached:
            log.info("parallel sampling: loaded %s on %s for the next prompt", info.model, ", ".join(devices))


def _on_ranks(item: tuple) -> set[str]:
    """The nodes of a prompt in ComfyUI's queue that use the ranks or may; without any it is in its tail at once."""
    return nodes_on_ranks(item[2], item[4], _types_of)


def _in_tail(item: tuple, on_ranks: set[str]) -> bool:
    """Of a prompt that runs."""
    state = get_progress_state()
    if state.prompt_id != item[1]:
        return False
    by_state: dict[NodeState, set[str]] = {}
    for node, one in list(state.nodes.items()):
        if node in item[2]:  # others were made by one of these
            by_state.setdefault(one["state"], set()).add(node)
    begun = by_state.get(NodeState.Running, set())
    return in_tail(item[2], on_ranks, begun, by_state.get(NodeState.Finished, set()))


def _types_of(kind: str) -> tuple[str, ...]:
    return tuple(getattr(nodes.NODE_CLASS_MAPPINGS.get(kind), "RETURN_TYPES", ()))
