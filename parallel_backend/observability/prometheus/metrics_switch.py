"""Turns metrics on or off at any time: while off, nothing listens and the metrics library is not imported."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from configparser import ConfigParser
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...errors import PlatformError
from ...sidecar import pool
from ...sidecar.group.events import listen
from ..gauges import read_gauges

if TYPE_CHECKING:
    from .metrics import Metrics

VARIABLE = "PARALLEL_SAMPLING_METRICS"  # on or off; overrides the setting
_WORDS = ConfigParser.BOOLEAN_STATES  # on, off and the like

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class MetricsAnswer:
    """The HTTP answer to one scrape."""

    status: int
    body: bytes
    content_type: str = "text/plain; charset=utf-8"


class MetricsSwitch:
    """Follows `setting()`, the user's choice, unless VARIABLE is set. Counts are kept while metrics are off.
    `price`: returns the price of a device-hour, 0 for none."""

    def __init__(self, setting: Callable[[], bool], price: Callable[[], float]) -> None:
        self._setting, self._price = setting, price
        self._lock = threading.Lock()
        self._metrics: Metrics | None = None
        self._stop_listening: Callable[[], None] | None = None
        self._warned = ""

    def follow(self) -> Metrics | None:
        """Turns metrics on or off as requested now. Returns None for off. Raises PlatformError without the library."""
        with self._lock:
            is_on = self._is_requested()
            if is_on and self._stop_listening is None:
                self._metrics = self._metrics or self._new_metrics()
                self._stop_listening = listen(self._metrics.on_event)
            elif not is_on and self._stop_listening is not None:
                self._stop_listening()
                self._stop_listening = None
            return self._metrics if is_on else None

    def begin(self) -> None:
        """Runs `follow` when ComfyUI starts: logs what is wrong and raises nothing."""
        try:
            self.follow()
        except PlatformError as error:
            log.warning("parallel sampling: %s", error)

    def scrape(self) -> MetricsAnswer:
        """Answers Prometheus: the metrics, or advice with status 404 if they are off, 503 without the library."""
        try:
            metrics = self.follow()
        except PlatformError as error:
            return MetricsAnswer(503, f"{error}\n".encode())
        if metrics is None:
            return MetricsAnswer(404, f"{self._how_to_turn_on()}\n".encode())
        from .metrics import CONTENT_TYPE

        return MetricsAnswer(200, metrics.text(), CONTENT_TYPE)

    def _is_requested(self) -> bool:
        word = os.environ.get(VARIABLE, "").strip().lower()
        if word in _WORDS:
            return _WORDS[word]
        if word and word != self._warned:
            self._warned = word
            log.warning(
                "parallel sampling: %s is %r; on and off are known, the setting counts", VARIABLE, word[:40]
            )
        return bool(self._setting())

    def _how_to_turn_on(self) -> str:
        if os.environ.get(VARIABLE, "").strip().lower() in _WORDS:
            return (
                f"The metrics of Parallel Sampling are off: {VARIABLE} is {os.environ[VARIABLE]!r}. Start ComfyUI "
                f"with {VARIABLE}=on, or without it to use the setting."
            )
        return (
            "The metrics of Parallel Sampling are off. Turn on Metrics for Prometheus in ComfyUI's Settings, Parallel "
            f"Sampling, or start ComfyUI with {VARIABLE}=on."
        )

    def _new_metrics(self) -> Metrics:
        try:
            from .metrics import Metrics
        except ImportError as error:
            raise PlatformError(
                f"Metrics need the package prometheus_client ({error}). Install it into ComfyUI's Python environment "
                "with `pip install prometheus_client`, then restart ComfyUI; or turn the metrics off."
            ) from None
        return Metrics(lambda: [one.status() for one in pool.all_sidecars()], read_gauges, self._price)
