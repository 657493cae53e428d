"""The outcome of a self-test of one class of ComfyUI's modules: what its process tells the one that started it."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import RequestError
from ...requests import TOKEN_MODES


@dataclass(frozen=True)
class SelfTest:
    """`mode`: the most that tokens of the class may stay apart, one of requests.TOKEN_MODES; `worst`: the largest
    relative difference of what decided that, 0 where no numbers came; `error`: why none came."""

    class_name: str
    mode: str
    worst: float
    error: str = ""

    def __post_init__(self) -> None:
        if self.mode not in TOKEN_MODES:
            raise RequestError(f"tokens {self.mode!r} is unknown; choose one of {', '.join(TOKEN_MODES)}.")
