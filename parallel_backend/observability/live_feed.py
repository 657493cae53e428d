"""Sends a picture of something to those who look at it: soon after it changed, once a second, and never to nobody."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")

MOST_CLIENTS = 64  # who look at the same time; more are refused


class LiveSender(Generic[T]):
    """Has one thread while somebody looks, and none otherwise.

    `compose()` makes the message; `send(message, client)` says whether that client is still there. A client gets what
    it has not got already: at most every `gap` seconds after `changed`, and every `period` seconds. `left()` is called
    when the last one has gone.
    """

    def __init__(
        self,
        compose: Callable[[], T],
        send: Callable[[T, str], bool],
        *,
        left: Callable[[], None] = lambda: None,
        gap: float = 0.25,
        period: float = 1.0,
    ) -> None:
        self._compose, self._send, self._left = compose, send, left
        self._gap, self._period = gap, period
        self._lock = threading.Condition()
        self._leases: dict[str, float] = {}  # client: time.monotonic() until which it looks
        self._sent: dict[str, T] = {}  # what it got last
        self._changed = False
        self._thread: threading.Thread | None = None

    def watch(self, client: str, seconds: float, *, anew: bool = False) -> bool:
        """`client` looks for the next `seconds`, and gets a message at once if it did not look before, or has lost what
        it got (`anew`). False: too many look already."""
        with self._lock:
            if client not in self._leases and len(self._leases) >= MOST_CLIENTS:
                return False
            if anew:
                self._sent.pop(client, None)
            self._changed |= anew or client not in self._leases
            self._leases[client] = time.monotonic() + seconds
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="parallel-live", daemon=True)
                self._thread.start()
            self._lock.notify()
            return True

    def leave(self, client: str) -> None:
        """`client` does not look any more."""
        with self._lock:
            self._forget(client)
            self._lock.notify()

    def close(self) -> None:
        """Nobody looks any more; returns when no message is on its way."""
        with self._lock:
            self._leases.clear()
            self._sent.clear()
            thread = self._thread
            self._lock.notify()
        if thread is not None:
            thread.join()

    def changed(self) -> None:
        """Something happened that a message may show. Any thread; costs next to nothing while nobody looks."""
        if self._leases:
            with self._lock:
                self._changed = True
                self._lock.notify()

    def _forget(self, client: str) -> None:
        self._leases.pop(client, None)
        self._sent.pop(client, None)

    def _run(self) -> None:
        last, failing = float("-inf"), False
        while (clients := self._wait(last)) is not None:
            last = time.monotonic()
            try:
                message = self._compose()
                for client in clients:
                    self._deliver(client, message)
                failing = False
            except Exception:  # what cannot be made now may be made the next time
                if not failing:  # else the log has it already
                    log.exception("parallel sampling: what the page shows could not be sent")
                failing = True

    def _wait(self, last: float) -> tuple[str, ...] | None:
        """The clients, once they are due for a message; None when there are none, which ends the thread."""
        with self._lock:
            while True:
                now = time.monotonic()
                for client in [name for name, until in self._leases.items() if until <= now]:
                    self._forget(client)
                if not self._leases:
                    self._thread = None
                    self._left()
                    return None
                due = last + (self._gap if self._changed else self._period)
                if due <= now:
                    self._changed = False
                    return tuple(self._leases)
                self._lock.wait(due - now)

    def _deliver(self, client: str, message: T) -> None:
        with self._lock:
            if client not in self._leases or self._sent.get(client) == message:
                return
            self._sent[client] = message
        if not self._send(message, client):
            with self._lock:
                self._forget(client)
