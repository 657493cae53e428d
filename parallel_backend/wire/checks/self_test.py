"""The outcome of a self-test of one class of ComfyUI's modules, sent to the process that started the test."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import RequestError
from ...requests import TOKEN_MODES


@dataclass(frozen=True)
class SelfTest:
    """The outcome of a self-test. `mode`: the widest of requests.TOKEN_MODES that passed; `worst`: the largest relative
    difference of the runs that decided this, 0 if there are no numbers; `error`: why there are none."""

    class_name: str
    mode: str
    worst: float
    error: str = ""

    def __post_init__(self) -> None:
        if self.mode not in TOKEN_MODES:
            raise RequestError(f"tokens {self.mode!r} is unknown; choose one of {', '.join(TOKEN_MODES)}.")
