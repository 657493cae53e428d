"""Latents that were computed ahead of their prompts' turns, until these come to them or are gone from the queue."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from ..host.calls import RunRecord
    from ..sampling_job import SamplingJob

MOST_BYTES = 1 << 30  # of all of them
_LOOK_AGAIN = 0.5  # s; a prompt that is gone leaves a latent of some MB, and what it was computed from

Key = tuple[str, str]  # (prompt id, node id)


class Ahead:
    """What a prompt's sampler will give. It holds for the very objects that it was computed from, which ComfyUI's cache
    hands to each prompt that gets them by the same nodes and values."""

    def __init__(self, job: SamplingJob, seed: int, samples: Tensor, record: RunRecord) -> None:
        self.samples, self.record = samples, record
        self._inputs = {**vars(job), "seed": seed}
        # The model by a weak reference: while anybody holds it, the ranks keep its weights.
        self._model = weakref.ref(self._inputs.pop("parallel_model"))

    @property
    def bytes(self) -> int:
        return self.samples.numel() * self.samples.element_size()

    def is_for(self, job: SamplingJob, *, any_seed: bool = False) -> bool:
        """Whether it comes from the same objects and equal numbers; with `any_seed`, of the seed apart."""
        inputs = {**vars(job), "seed": self._inputs["seed"] if any_seed else job.seed}
        return inputs["parallel_model"] is self._model() and all(
            inputs[name] == value if isinstance(value, (int, float, str)) else inputs[name] is value
            for name, value in self._inputs.items()
        )


@dataclass
class KeptLatents:
    """Any thread. `queued`: the ids of the prompts that run or wait."""

    queued: Callable[[], Collection[str]]

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._ahead: dict[Key, list[Ahead]] = {}
        self._alone: set[str] = set()  # prompts that shall be computed alone
        self._missed: set[str] = set()  # nodes that asked for another job than was computed ahead
        self._watcher: threading.Thread | None = None

    @property
    def bytes(self) -> int:
        with self._lock:
            return sum(one.bytes for kept in self._ahead.values() for one in kept)

    def take(self, key: Key, job: SamplingJob) -> Ahead | None:
        """What was computed for this job of this prompt, which is not kept any longer. Where all that is kept for it is
        for another job, ComfyUI has not kept what it had when that was computed, and may not the next time either."""
        with self._lock:
            kept = self._ahead.get(key, [])
            found = next((one for one in kept if one.is_for(job)), None)
            if found is not None:
                kept.remove(found)
            elif kept:
                self._alone.add(key[0])
                self._missed.add(key[1])
            if found is None or not kept:
                self._ahead.pop(key, None)
            return found

    def keep(self, key: Key, ahead: Ahead) -> None:
        """Until it is taken or its prompt is gone."""
        with self._lock:
            self._ahead.setdefault(key, []).append(ahead)
            self._watch()

    def leave_alone(self, prompts: Collection[str]) -> None:
        """As long as they run or wait."""
        with self._lock:
            self._alone.update(prompts)
            self._watch()

    def has_missed(self, node: str) -> bool:
        """Whether what is computed ahead does not hold there, since the queue was empty the last time."""
        with self._lock:
            return node in self._missed

    def passed(self, node: str, job: SamplingJob) -> set[str]:
        """Prompts for which this job is not to be computed ahead: it was, or they run alone. Of a list of latents each
        is a job of its own."""
        with self._lock:
            there = {
                prompt
                for (prompt, other), kept in self._ahead.items()
                if other == node and any(one.is_for(job, any_seed=True) for one in kept)
            }
            return self._alone | there

    def _watch(self) -> None:
        if self._watcher is None:
            self._watcher = threading.Thread(target=self._forget, name="parallel-kept-latents", daemon=True)
            self._watcher.start()

    def _forget(self) -> None:
        """Drops what belongs to prompts that are gone, while there is anything."""
        while True:
            time.sleep(_LOOK_AGAIN)
            queued = set(self.queued())
            with self._lock:
                self._ahead = {key: kept for key, kept in self._ahead.items() if key[0] in queued}
                self._alone &= queued
                if not self._ahead and not self._alone and not (self._missed and queued):
                    self._missed.clear()
                    self._watcher = None
                    return
