"""Sends messages to the pages that watch something: soon after a change, else once a second, none without watchers."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")

MOST_CLIENTS = 64  # watching at the same time; more are refused


class LiveSender(Generic[T]):
    """Sends messages to watching clients, from one thread that exists only while a client watches.

    `compose()` makes the message; `send(message, client)` returns True if the client still exists. A client gets a
    message only if it differs from its last one: at most every `gap` seconds after `changed`, else every `period`
    seconds.
    """

    def __init__(
        self,
        compose: Callable[[], T],
        send: Callable[[T, str], bool],
        *,
        gap: float = 0.25,
        period: float = 1.0,
    ) -> None:
        self._compose, self._send = compose, send
        self._gap, self._period = gap, period
        self._lock = threading.Condition()
        self._leases: dict[str, float] = {}  # client: the time.monotonic() at which its watch ends
        self._sent: dict[str, T] = {}  # client: its last message
        self._changed = False
        self._thread: threading.Thread | None = None

    def watch(self, client: str, seconds: float, *, anew: bool = False) -> bool:
        """Registers `client` for the next `seconds`. It gets a message at once if it is new, or if it has lost its last
        message (`anew`). Returns False if too many clients watch."""
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
        """Removes `client`."""
        with self._lock:
            self._forget(client)
            self._lock.notify()

    def close(self) -> None:
        """Removes all clients; returns when no message is being sent."""
        with self._lock:
            self._leases.clear()
            self._sent.clear()
            thread = self._thread
            self._lock.notify()
        if thread is not None:
            thread.join()

    def changed(self) -> None:
        """Notes a change that messages may show. Thread-safe; almost free if no client watches."""
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
            except Exception:  # the next message may succeed
                if not failing:  # log only the first failure in a row
                    log.exception("parallel sampling: what the page shows could not be sent")
                failing = True

    def _wait(self, last: float) -> tuple[str, ...] | None:
        """Returns the clients when a message is due; None if there are none, which ends the thread."""
        with self._lock:
            while True:
                now = time.monotonic()
                for client in [name for name, until in self._leases.items() if until <= now]:
                    self._forget(client)
                if not self._leases:
                    self._thread = None
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
