"""Prepares the next waiting prompt: loads its model once all nodes of the running prompt that use the ranks have run
(its tail), and encodes its texts as soon as the ranks that hold the text encoder are idle."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from comfy_execution.progress import NodeState, get_progress_state

from ...parallel_backend.errors import ParallelError
from ...parallel_backend.sidecar.group.events import Event, RequestEnded
from ..host.prompt_graph import ENCODER, LOADERS, Prompt, class_of, links, needed
from ..host.prompt_links import type_of
from ..host.settings import setting
from .named_model import preload
from .next_texts import NextTexts

if TYPE_CHECKING:
    from execution import PromptQueue  # ComfyUI's

_LOOK_AGAIN = 0.02  # s between looks; decoding a small picture takes twice that
_COMPUTING = ("text", "sample", "decode", "encode")  # requests after which the watch of the queue starts
# Nodes that use the ranks without a diffusion model, or give a text encoder that uses them.
WITHOUT_A_MODEL = ("ParallelVAEDecode", "ParallelVAEEncode", ENCODER)
_ENCODERS = ("CLIP", "CLIP_VISION", "AUDIO_ENCODER")
# Link types that never carry a model of the ranks. Any other may: packs define types of their own.
_NO_MODEL = frozenset(
    {"LATENT", "IMAGE", "MASK", "VIDEO", "AUDIO", "CLIP", "CLIP_VISION", "VAE", "CONTROL_NET", "CONDITIONING"}
    | {"SIGMAS", "NOISE", "STRING", "INT", "FLOAT", "BOOLEAN", "COMBO", "PARALLEL_STRATEGY"}
)

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
            if running and following is not None and setting("preload_next"):
                item = running[0]
                if item[1] != running_id:
                    running_id, on_ranks = item[1], nodes_on_ranks(item[2], item[4])
                if texts is None or texts.prompt_id != following[1]:
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


def in_tail(prompt: Prompt, on_ranks: set[str], started: set[str], finished: set[str]) -> bool:
    """Returns True if none of the nodes `on_ranks` will run any more. A node that has not run will not run either if a
    node that takes its output has started: ComfyUI had the output in its cache."""
    origins = (origin for node in started | finished for _, origin, _ in links(prompt[node]["inputs"]))
    return on_ranks <= finished.union(needed(prompt, origins))


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
