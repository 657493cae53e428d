"""A bar for each rank under the node that runs, over ComfyUI's own websocket, to the page that queued the prompt."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from ...parallel_backend.observability.live_feed import LiveSender
from ...parallel_backend.observability.panel import Shown, show_progress
from ...parallel_backend.sidecar import pool
from ...parallel_backend.sidecar.group.events import listen
from .shown_node import shown_node

EVENT = "parallel_sampling.progress"
PERIOD = 0.5  # s; a load tells nobody how far it is, it has to be looked at


@contextmanager
def rank_bars() -> Iterator[None]:
    """Around what the node does, or over its `execute`. Sends {"node", "ranks": [{device, words, progress}]}, and an
    empty list at the end."""
    from server import PromptServer  # imports ComfyUI's whole server: not wanted before it runs

    shown = shown_node()
    server = getattr(PromptServer, "instance", None)
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
