"""Copies from a device to host memory, during which the host continues."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from ..errors import RequestError


def most_lag(device: torch.device) -> int:
    """Returns how many steps the host may be ahead of the last known result of `device`.

    With 0 a GPU would run out of work and wait for the host. On the CPU the host computes, so it knows every result.
    """
    return 1 if device.type == "cuda" else 0


class HostCopy:
    """A copy of a tensor to host memory, complete when `taken` returns it. A tensor on the host is not copied."""

    def __init__(self, tensor: Tensor) -> None:
        self._copy = tensor.to("cpu", non_blocking=True)  # into pinned memory
        self._arrived = torch.cuda.Event() if tensor.device.type == "cuda" else None
        if self._arrived is not None:
            self._arrived.record()

    def taken(self) -> Tensor:
        """Waits for the copy and returns it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._copy


class NumbersCheck:
    """A check that the values of each step are finite, evaluated `lag` steps later: otherwise the image is black."""

    def __init__(self, lag: int) -> None:
        self._lag = lag
        self._asked: deque[tuple[HostCopy, str]] = deque()

    def __call__(self, found: Tensor, when: str) -> None:
        """Checks `found`; raises RequestError for this or an earlier step, alike on all ranks with the same latent."""
        self._asked.append((HostCopy(found.isfinite().all()), when))
        self._settle(self._lag)

    def finish(self) -> None:
        """Evaluates all remaining checks. Raises RequestError for the first bad step."""
        self._settle(0)

    def _settle(self, most: int) -> None:
        while len(self._asked) > most:
            finite, when = self._asked.popleft()
            if not finite.taken():
                raise RequestError(
                    f"The model gave values that are NaN or infinite {when}; the image would be black. Its file may be "
                    f"damaged (download it again), a LoRA or cfg too strong, or weight_dtype too coarse (try bfloat16 "
                    f"or float32)."
                )
