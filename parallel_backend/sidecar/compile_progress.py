"""Ranks that compile in the middle of a request: said once to the person who waits, and given the time it takes."""

from __future__ import annotations

from torch import Tensor

from ..wire import deadlines
from ..wire.protocol import Compiling, Message
from .group.phases import OnPhase, Phase, PhaseKind


def latent_in_words(latent: object) -> str:
    """Returns the size of what is sampled in words; ComfyUI has several parts (video and sound) in one object."""
    if not isinstance(latent, Tensor) or latent.ndim < 2:
        return "this model"
    return f"a latent of {' x '.join(map(str, latent.shape[1:]))}"


class CompileWatch:
    """Of one request. `size`: of what it computes, for people."""

    def __init__(self, size: str, on_phase: OnPhase) -> None:
        self._phase = Phase(PhaseKind.COMPILING, size)
        self._on_phase = on_phase
        self._reported = False
        self._compiling = False

    def took(self, message: Message) -> bool:
        """Whether `message` was about compiling; any other ends it."""
        self._compiling = isinstance(message, Compiling)
        if self._compiling and not self._reported:
            self._reported = True
            self._on_phase(self._phase)
        return self._compiling

    def budget(self, usual: float) -> float:
        """Seconds until the next sign of life, where it would be `usual` without compiling."""
        return max(usual, deadlines.FIRST_STEP) if self._compiling else usual
