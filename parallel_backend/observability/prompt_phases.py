"""Counts what a prompt had the devices for: its texts, loading, sampling, pictures to encode and to decode."""

from __future__ import annotations

import threading

from ..sidecar.group.events import Ended, Event

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

    def on_event(self, event: Event) -> None:
        """Counts a request that has ended well. What it loaded is a phase of its own."""
        if not isinstance(event, Ended) or not event.prompt_id or event.result != "done":
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
                del self._seconds[next(iter(self._seconds))]

    def in_words(self, prompt_id: str) -> list[str]:
        """A line on the phases of a prompt until now, with their shares; none where it only sampled."""
        with self._lock:
            spent = dict(self._seconds.get(prompt_id, {}))
        whole = sum(spent.values())
        if not spent.keys() - _ALONE or not whole:
            return []
        words = [
            text.format(time=f"{seconds:.3g}", share=f"{seconds / whole:.0%}")
            for request, text in _PHASES.items()
            if (seconds := spent.get(request))
        ]
        return [f"this prompt on the devices: {whole:.3g} s so far: {', '.join(words)}"]


PHASES = PromptPhases()
