"""A bar for each rank under the running node, sent over ComfyUI's own websocket to the page that queued the prompt."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from ...parallel_backend.observability.live_feed import LiveSender
from ...parallel_backend.observability.panel import Shown, show_progress
from ...parallel_backend.sidecar import pool
from ...parallel_backend.sidecar.group.events import listen
from .page import comfyui_server, shown_node

EVENT = "parallel_sampling.progress"
PERIOD = 0.5  # s; a load sends no event on its progress, so it is polled


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
