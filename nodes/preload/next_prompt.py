"""Prepares the next waiting prompt: loads its model once the running prompt needs the ranks no more (its tail),
and encodes its texts as soon as the ranks that hold the text encoder are idle."""

from __future__ import annotations

import logging
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

from comfy_execution.progress import NodeState, get_progress_state

from ...parallel_backend.errors import ParallelError
from ...parallel_backend.sidecar.group.events import Event, RequestEnded
from ..host.prompt_graph import Prompt
from ..host.settings import setting
from .named_model import preload
from .next_texts import NextTexts
from .tail import in_tail, loaders, nodes_on_ranks

if TYPE_CHECKING:
    from execution import PromptQueue  # ComfyUI's

_LOOK_AGAIN = 0.02  # s between looks; decoding a small picture takes twice that
_COMPUTING = ("text", "sample", "decode", "encode")  # requests after which the watch of the queue starts

log = logging.getLogger(__name__)


def uses_ranks(queue: PromptQueue) -> bool:
    """Returns True if a running prompt uses the ranks, or may do so later."""
    running, _ = queue.get_current_queue_volatile()
    return any((found := nodes_on_ranks(item[2], item[4])) and not _in_tail(item, found) for item in running)


class NextPrompt:
    """Watches the queue in a thread, from the first request of a prompt until the queue is empty."""

    def __init__(self, queue: PromptQueue) -> None:
        self._queue = queue
        self._lock = threading.Lock()
        self._is_looking = False

    def on_event(self, event: Event) -> None:
        """Starts the thread when a prompt's request ends, unless it already runs. A listener of events.py."""
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
            if texts is not None and (following is None or texts.prompt_id != following[1]):
                texts = None  # it holds a text encoder
            if running and following is not None and setting("preload_next"):
                item = running[0]
                if item[1] != running_id:
                    running_id, on_ranks = item[1], nodes_on_ranks(item[2], item[4])
                if texts is None:
                    texts = NextTexts(following, partial(self._is_gone, following[1]))
                in_tail = _in_tail(item, on_ranks)
                texts.encode(in_tail=in_tail)
                if in_tail and following[1] != loaded:
                    loaded = following[1]
                    _preload_all(following[2], following[4])
            time.sleep(_LOOK_AGAIN)

    def _has_ended(self) -> bool:
        """Returns True and ends the watch, unless a new prompt has come."""
        with self._lock:
            self._is_looking = any(self._queue.get_current_queue_volatile())
            return not self._is_looking

    def _is_gone(self, prompt_id: str) -> bool:
        """Returns True if the prompt neither waits nor runs."""
        running, waiting = self._queue.get_current_queue_volatile()
        return all(item[1] != prompt_id for item in (*running, *waiting))


def _preload_all(prompt: Prompt, outputs: list[str]) -> None:
    """Loads the models of a prompt on running ranks: starting others would take CPU cores from the running prompt."""
    for node in loaders(prompt, outputs):
        try:
            info, devices = preload(prompt, node, only_warm=True)
        except ParallelError as error:
            log.info("parallel sampling: the next prompt's model waits for its prompt: %s", error)
            return
        except Exception:  # a malformed prompt fails with a message when it runs
            log.warning("parallel sampling: the next prompt's model is not known", exc_info=True)
            return
        if not info.cached:
            log.info("parallel sampling: loaded %s on %s for the next prompt", info.model, ", ".join(devices))


def _in_tail(item: tuple, on_ranks: set[str]) -> bool:
    """Returns True if the running prompt `item` will not use the ranks any more."""
    state = get_progress_state()
    if state.prompt_id != item[1]:
        return False
    # Nodes that are not in the prompt were made by its nodes as they ran.
    states = {node: one["state"] for node, one in list(state.nodes.items()) if node in item[2]}
    started = {node for node, one in states.items() if one is NodeState.Running}
    finished = {node for node, one in states.items() if one is NodeState.Finished}
    return in_tail(item[2], on_ranks, started, finished)
