"""ComfyUI's server towards its page: the running node as the page shows it, a bar for each rank there, and events."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from comfy_execution.progress import get_progress_state
from comfy_execution.utils import get_executing_context

from ...parallel_backend.observability.live_feed import LiveSender
from ...parallel_backend.observability.panel import Shown, show_progress
from ...parallel_backend.sidecar import pool
from ...parallel_backend.sidecar.group.events import listen

if TYPE_CHECKING:
    from server import PromptServer  # ComfyUI's

EVENT = "parallel_sampling.progress"
PERIOD = 0.5  # s; a load sends no event on its progress, so it is polled


def comfyui_server() -> PromptServer | None:
    """Returns the running server; None if ComfyUI's code runs without one."""
    from server import PromptServer  # imports ComfyUI's whole server, so not at module load

    return getattr(PromptServer, "instance", None)


def shown_node() -> tuple[str, str] | None:
    """Returns (prompt id, node id) of the node that runs in this thread; None outside of a prompt. A node that another
    one made during the run, as loops do, is shown as the node that stands for it on the page."""
    context = get_executing_context()
    if context is None:
        return None
    return context.prompt_id, get_progress_state().dynprompt.get_display_node_id(context.node_id)


def send_event(event: str, data: dict[str, object]) -> None:
    """Sends an event to the page that queued the running prompt, if a page did."""
    server = comfyui_server()
    client = getattr(server, "client_id", None)
    if client is not None:
        server.send_sync(event, data, client)


@contextmanager
def rank_bars() -> Iterator[None]:
    """Shows the bars during a `with` block, or during a function that it decorates. Sends {"node", "ranks": [{device,
    words, progress}]}, with an empty list of ranks at the end."""
    shown, server = shown_node(), comfyui_server()
    client = getattr(server, "client_id", None)
    if shown is None or client is None:
        yield
        return

    def compose() -> list[Shown]:
        return show_progress(sidecar.status() for sidecar in pool.all_sidecars())

    def send(ranks: list[Shown], client: str) -> bool:
        server.send_sync(EVENT, {"node": shown[1], "ranks": ranks}, client)
        return True

    sender = LiveSender(compose, send, period=PERIOD)
    stop = listen(lambda event: sender.changed())
    sender.watch(client, math.inf)
    try:
        yield
    finally:
        stop()
        sender.close()
        send([], client)
