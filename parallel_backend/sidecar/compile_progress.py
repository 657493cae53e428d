"""Ranks that compile in the middle of a request: said once to the person who waits, and given the time it takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..wire import deadlines
from ..wire.protocol import Compiling, Message

_PIXELS_PER_LATENT = 8


class CompileWatch:
    """Of one request. `latent_shape`: [..., h, w]; `say` shows a text to whoever waits."""

    def __init__(self, latent_shape: Sequence[int], say: Callable[[str], None]) -> None:
        height, width = (side * _PIXELS_PER_LATENT for side in latent_shape[-2:])
        self._text = f"compiling for {width} x {height}; this step takes longer"
        self._say = say
        self._said = False
        self._compiling = False

    def took(self, message: Message) -> bool:
        """Whether `message` was about compiling; any other ends it."""
        self._compiling = isinstance(message, Compiling)
        if self._compiling and not self._said:
            self._said = True
            self._say(self._text)
        return self._compiling

    def budget(self, usual: float) -> float:
        """Seconds until the next sign of life, where it would be `usual` without compiling."""
        return max(usual, deadlines.FIRST_STEP) if self._compiling else usual
