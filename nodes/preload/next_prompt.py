"""Loads the next waiting prompt's model while the one that runs is in its tail and leaves the ranks idle, and encodes
its texts as soon as those that hold the text encoder are."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from comfy_execution.progress import NodeState, get_progress_state

from ...parallel_backend.errors import ParallelError
from ...parallel_backend.sidecar.group.events import Event, RequestEnded
from ..host.prompt_graph import Prompt
from ..host.prompt_links import types_of
from .named_model import preload
from .next_texts import NextTexts
from .tail import in_tail, loaders, nodes_on_ranks

if TYPE_CHECKING:
    from execution import PromptQueue  # ComfyUI's

_LOOK_AGAIN = 0.02  # s; a small picture is decoded in twice that
_COMPUTING = ("text", "sample", "decode", "encode")  # requests of a prompt that is looked at from then on

log = logging.getLogger(__name__)


def uses_ranks(queue: PromptQueue) -> bool:
    """Whether a prompt runs that has nodes before it, or at work, that use the ranks or may."""
    running, _ = queue.get_current_queue_volatile()
    return any((found := _on_ranks(item)) and not _in_tail(item, found) for item in running)


class NextPrompt:
    """`on_event` is a listener of events.py; a thread looks from a prompt's first request until no prompts are left."""

    def __init__(self, queue: PromptQueue, requested: Callable[[], bool]) -> None:
        self._queue, self._requested = queue, requested
        self._lock = threading.Lock()
        self._is_looking = False

    def on_event(self, event: Event) -> None:
        """Starts to look, where that is wished."""
        if not (isinstance(event, RequestEnded) and event.prompt_id and event.request in _COMPUTING):
            return
        with self._lock:
            if self._is_looking:
                return
            self._is_looking = True
        threading.Thread(target=self._watch, name="parallel-next-prompt", daemon=True).start()

    def _watch(self) -> None:
        running_id = loaded = ""
        on_ranks: set[str] = set()
        texts: NextTexts | None = None
        while True:
            running, waiting = self._queue.get_current_queue_volatile()
            if not running and not waiting and self._has_ended():
                return
            following = min(waiting, key=lambda item: item[:2], default=None)
            if running and following is not None and self._requested():
                item = running[0]
                if item[1] != running_id:
                    running_id, on_ranks = item[1], _on_ranks(item)
                if texts is None or texts.prompt_id != following[1]:
                    texts = NextTexts(following, partial(self._is_gone, following[1]))
                in_tail = _in_tail(item, on_ranks)
                texts.encode(in_tail=in_tail)
                if in_tail and following[1] != loaded:
                    loaded = following[1]
                    _preload_all(following[2], following[4])
            time.sleep(_LOOK_AGAIN)

    def _has_ended(self) -> bool:
        """Returns True, and looks no more, unless a prompt has come meanwhile."""
        with self._lock:
            self._is_looking = any(self._queue.get_current_queue_volatile())
            return not self._is_looking

    def _is_gone(self, prompt_id: str) -> bool:
        """True for a prompt that neither waits nor runs."""
        running, waiting = self._queue.get_current_queue_volatile()
        return all(item[1] != prompt_id for item in (*running, *waiting))


def _preload_all(prompt: Prompt, outputs: list[str]) -> None:
    """The models of a prompt, one after the other, on ranks that run already; to start some would take cores away."""
    for node in loaders(prompt, outputs, types_of):
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
    return nodes_on_ranks(item[2], item[4], types_of)


def _in_tail(item: tuple, on_ranks: set[str]) -> bool:
    """Of a prompt that runs."""
    state = get_progress_state()
    if state.prompt_id != item[1]:
        return False
    by_state: dict[NodeState, set[str]] = {}
    for node, one in list(state.nodes.items()):
        if node in item[2]:  # others were made by one of these
            by_state.setdefault(one["state"], set()).add(node)
    started = by_state.get(NodeState.Running, set())
    return in_tail(item[2], on_ranks, started, by_state.get(NodeState.Finished, set()))
