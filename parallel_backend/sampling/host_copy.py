"""What a device computed, on its way to the host, which goes on meanwhile."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from ..requests import bad_numbers


def most_lag(device: torch.device) -> int:
    """Steps that the host may be ahead of what it knows of its device: a GPU without work would wait for the host.

    On the CPU the host computes itself: a step that was computed is known.
    """
    return 1 if device.type == "cuda" else 0


class HostCopy:
    """A copy of a tensor in host memory, once it is `taken`; what is on the host already stays where it is."""

    def __init__(self, tensor: Tensor) -> None:
        self._copy = tensor.to("cpu", non_blocking=True)  # into pinned memory
        self._arrived = torch.cuda.Event() if tensor.device.type == "cuda" else None
        if self._arrived is not None:
            self._arrived.record()

    def taken(self) -> Tensor:
        """Waits for it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copy


class NumbersCheck:
    """requests.check_numbers of one step after the other, each answered `lag` steps later."""

    def __init__(self, lag: int) -> None:
        self._lag = lag
        self._asked: deque[tuple[HostCopy, str]] = deque()

    def __call__(self, found: Tensor, when: str) -> None:
        """Raises RequestError for this step or an earlier one, the same on ranks that have the same latent."""
        self._asked.append((HostCopy(found.isfinite().all()), when))
        self._settle(self._lag)

    def finish(self) -> None:
        """Raises RequestError for any step."""
        self._settle(0)

    def _settle(self, most: int) -> None:
        while len(self._asked) > most:
            finite, when = self._asked.popleft()
            if not finite.taken():
                raise bad_numbers(when)
