"""Compilation in the middle of a request: the user is told once, and the ranks get more time."""

from __future__ import annotations

from torch import Tensor

from ..wire import deadlines
from ..wire.protocol import Compiling, Message
from .group.phases import OnPhase, Phase, PhaseKind


def latent_in_words(latent: object) -> str:
    """Returns a latent's size in words; "this model" for one of several parts (video and sound), which is no Tensor."""
    if not isinstance(latent, Tensor) or latent.ndim < 2:
        return "this model"
    return f"a latent of {' x '.join(map(str, latent.shape[1:]))}"


class CompileWatch:
    """The compilation state of one request. `size`: of what it computes, in words for the user."""

    def __init__(self, size: str, on_phase: OnPhase) -> None:
        self._phase = Phase(PhaseKind.COMPILING, size)
        self._on_phase = on_phase
        self._reported = False
        self._compiling = False

    def took(self, message: Message) -> bool:
        """Returns True if `message` says that a rank compiles; any other message ends that state."""
        self._compiling = isinstance(message, Compiling)
        if self._compiling and not self._reported:
            self._reported = True
            self._on_phase(self._phase)
        return self._compiling

    def budget(self, usual: float) -> float:
        """Returns the seconds allowed until the next sign of life: `usual`, and at least FIRST_STEP while compiling."""
        return max(usual, deadlines.FIRST_STEP) if self._compiling else usual
