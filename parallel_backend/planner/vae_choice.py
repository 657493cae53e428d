"""Chooses by measured times between all devices, which split a VAE's picture by rows, and one device."""

from __future__ import annotations

import time

from ..machine.fingerprint import device_key
from ..strategy import ParallelStrategy
from .history import GIVEN_UP, MeasurementHistory
from .store import RunKind, workload_of

# `auto` tries one device if a picture is expected to take at most this many seconds there; the second try is timed.
LONGEST_TRY = 10.0
# Kinds whose first call in this process, with its one-time costs, is over.
_WARM: set[RunKind] = set()


class VaeChoice:
    """Chooses for pictures of one size. `history`: of the devices, None if it cannot be opened; `network`: text that
    identifies the VAE; `size`: one picture's latent or pixels [C, (t,) h, w]; `tries`: True if one device may be
    tried."""

    def __init__(
        self, history: MeasurementHistory | None, network: str, size: tuple[int, ...], *, tries: bool
    ) -> None:
        self._history, self._tries = history, tries
        if history is not None:
            *_, frames, height, width = (1, *size[1:])
            sizes = {"width": width, "height": height, "frames": frames, "batch": 1, "prompts": 0}
            no_text = {"text_tokens": 0, "reference_tokens": 0, "model_calls": 1}
            workload = workload_of(network, **sizes, **no_text)
            ids = history.ids
            all_devices = ParallelStrategy(ulysses_degree=len(ids))
            self._shared = RunKind(workload, "rows", all_devices, device_key(ids))
            self._alone = RunKind(workload, "rows", ParallelStrategy(), device_key(ids[:1]))

    @property
    def shared_seconds(self) -> float | None:
        """Seconds of one picture over all devices, None if unmeasured."""
        history = self._history
        return None if history is None else history.store.seconds(self._shared, time.time())

    @property
    def alone_seconds(self) -> float | None:
        """Seconds of one picture on one device, None if unmeasured."""
        history = self._history
        return None if history is None else history.store.seconds(self._alone, time.time())

    def is_alone(self) -> bool:
        """Returns True if one device should compute: it is faster, or is to be tried."""
        shared, alone = self.shared_seconds, self.alone_seconds
        if self._history is None or shared is None or self._alone in GIVEN_UP:
            return False
        if alone is not None:
            return alone < shared
        return self._tries and shared * len(self._history.devices) <= LONGEST_TRY

    def record(self, seconds: float, *, is_alone: bool) -> None:
        """Stores the time of a picture, unless it is the first of its kind in this process."""
        if self._history is None:
            return
        kind = self._alone if is_alone else self._shared
        if kind in _WARM:
            self._history.store.record([(kind, seconds)], time.time())
        _WARM.add(kind)

    def give_up(self) -> None:
        """Records that one device had too little memory; this process does not try it again."""
        if self._history is not None:
            GIVEN_UP.add(self._alone)
