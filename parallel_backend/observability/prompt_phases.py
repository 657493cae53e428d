"""Counts the device time of each prompt by phase: text encoding, VAE encoding, loading, sampling, VAE decoding."""

from __future__ import annotations

import threading
from collections import defaultdict

from ..sidecar.group.events import Event, RequestEnded

MOST_PROMPTS = 32  # the latest ones
# By request kind, in the order of a prompt.
_PHASES = {
    "text": "text",
    "encode": "encoding",
    "load": "loading",
    "sample": "sampling",
    "decode": "decoding",
}
_GAIN = "gain"  # counted like a phase
_ALONE = {"load", "sample", _GAIN}  # reports have separate lines for these


class PromptPhases:
    """The seconds by phase of the latest prompts. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: dict[str, dict[str, float]] = {}  # by prompt; each a defaultdict

    def on_event(self, event: Event) -> None:
        """Adds a request that has succeeded. Its load counts as a phase of its own."""
        if not isinstance(event, RequestEnded) or not event.prompt_id or event.result != "done":
            return
        if event.request not in _PHASES:
            return
        load = None if event.info is None else event.info.load
        loading = 0.0 if load is None else load.seconds
        with self._lock:
            spent = self._seconds.setdefault(event.prompt_id, defaultdict(float))
            spent["load"] += loading
            spent[event.request] += max(0.0, event.seconds - loading)
            while len(self._seconds) > MOST_PROMPTS:
                del self._seconds[next(iter(self._seconds))]

    def add_gain(self, prompt_id: str, seconds: float) -> None:
        """Adds the seconds that a sampler's steps or a VAE's pictures took less than on one device."""
        with self._lock:
            if prompt_id in self._seconds:
                self._seconds[prompt_id][_GAIN] += seconds

    def spent(self, prompt_id: str) -> dict[str, float]:
        """Returns seconds by phase, in order: text, encode, load, sample, decode; {} if the prompt only sampled."""
        with self._lock:
            spent = self._seconds.get(prompt_id, {})
            if not spent.keys() - _ALONE:
                return {}
            return {phase: spent[phase] for phase in _PHASES if spent.get(phase)}

    def with_and_without_gain(self, prompt_id: str) -> tuple[float, float]:
        """Returns (a prompt's seconds so far, those it would have taken if the measured parts ran on one device);
        (0, 0) if it only sampled, or if no time on one device is known."""
        total = sum(self.spent(prompt_id).values())
        with self._lock:
            gain = self._seconds.get(prompt_id, {}).get(_GAIN, 0.0)
        return (total, total + gain) if total and gain else (0.0, 0.0)

    def in_words(self, prompt_id: str) -> list[str]:
        """Returns a line on the phases of a prompt so far, with their shares; empty if it only sampled."""
        spent = self.spent(prompt_id)
        total = sum(spent.values())
        if not total:
            return []
        words = (f"{_PHASES[phase]} {took:.3g} s ({took / total:.0%})" for phase, took in spent.items())
        return [f"this prompt on the devices: {total:.3g} s so far: {', '.join(words)}"]


PHASES = PromptPhases()
