"""Counts what a prompt had the devices for: its texts, loading, sampling, pictures to encode and to decode."""

from __future__ import annotations

import threading

from ..sidecar.group.events import Event, RequestEnded

MOST_PROMPTS = 32  # the latest ones
# In the order of a prompt, by the request that they are.
_PHASES = {
    "text": "text {time} s ({share})",
    "encode": "encoding {time} s ({share})",
    "load": "loading {time} s ({share})",
    "sample": "sampling {time} s ({share})",
    "decode": "decoding {time} s ({share})",
}
_ALONE = {"load", "sample"}  # of which reports have lines of their own


class PromptPhases:
    """Seconds by phase of the latest prompts. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: dict[str, dict[str, float]] = {}
        self._gains: dict[str, float] = {}

    def on_event(self, event: Event) -> None:
        """Counts a request that has ended well. What it loaded is a phase of its own."""
        if not isinstance(event, RequestEnded) or not event.prompt_id or event.result != "done":
            return
        if event.request not in _PHASES:
            return
        load = None if event.info is None else event.info.load
        loading = 0.0 if load is None else load.seconds
        with self._lock:
            spent = self._seconds.setdefault(event.prompt_id, {})
            spent["load"] = spent.get("load", 0.0) + loading
            spent[event.request] = spent.get(event.request, 0.0) + max(0.0, event.seconds - loading)
            while len(self._seconds) > MOST_PROMPTS:
                oldest = next(iter(self._seconds))
                del self._seconds[oldest]
                self._gains.pop(oldest, None)

    def add_gain(self, prompt_id: str, seconds: float) -> None:
        """Counts by how much the steps of a sampler, or pictures of a VAE, took less than on one device."""
        with self._lock:
            if prompt_id in self._seconds:
                self._gains[prompt_id] = self._gains.get(prompt_id, 0.0) + seconds

    def spent(self, prompt_id: str) -> dict[str, float]:
        """Seconds by phase (text, encode, load, sample, decode), in that order; {} where the prompt only sampled."""
        with self._lock:
            spent = self._seconds.get(prompt_id, {})
            if not spent.keys() - _ALONE:
                return {}
            return {phase: spent[phase] for phase in _PHASES if spent.get(phase)}

    def with_and_without_gain(self, prompt_id: str) -> tuple[float, float]:
        """Seconds of a prompt until now, and those that it would have taken with what was timed there on one device;
        (0, 0) where it only sampled, or nobody knows what one device takes."""
        whole = sum(self.spent(prompt_id).values())
        with self._lock:
            gain = self._gains.get(prompt_id, 0.0)
        return (whole, whole + gain) if whole and gain else (0.0, 0.0)

    def in_words(self, prompt_id: str) -> list[str]:
        """A line on the phases of a prompt until now, with their shares; none where it only sampled."""
        spent = self.spent(prompt_id)
        whole = sum(spent.values())
        if not whole:
            return []
        words = [
            _PHASES[phase].format(time=f"{seconds:.3g}", share=f"{seconds / whole:.0%}")
            for phase, seconds in spent.items()
        ]
        return [f"this prompt on the devices: {whole:.3g} s so far: {', '.join(words)}"]


PHASES = PromptPhases()
