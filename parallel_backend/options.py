"""How the ranks compute a model, as a person may choose it: compiled blocks or not, and the kernel of attention."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import RequestError

COMPILE_MODES = ("off", "blocks")
# `torch` is scaled_dot_product_attention; the others are those of the packages that people install.
ATTENTION_KERNELS = ("auto", "torch", "cudnn", "flash", "flash_3", "sage")
# A variable with a backend of torch.compile in place of inductor: `aot_eager` and `eager` need no C++ compiler and show
# whether a fault is inductor's. For tests, and for finding faults.
COMPILE_BACKEND = "PARALLEL_SAMPLING_COMPILE_BACKEND"
APPROXIMATE_KERNELS = ("sage",)  # it quantises queries, keys and values


@dataclass(frozen=True)
class Computing:
    """`compile`: one of COMPILE_MODES; `attention`: one of ATTENTION_KERNELS."""

    compile: str = "off"
    attention: str = "auto"

    def __post_init__(self) -> None:
        for name, value, known in (
            ("compile", self.compile, COMPILE_MODES),
            ("attention", self.attention, ATTENTION_KERNELS),
        ):
            if value not in known:
                raise RequestError(f"{name} {value!r} is unknown; choose one of {', '.join(known)}.")

    @property
    def compiles(self) -> bool:
        return self.compile != "off"


PLAIN = Computing()


@dataclass(frozen=True)
class Compiled:
    """What compiling did in a request, of one rank or of the one that did most: `graphs` new ones in `seconds`;
    `uncompiled`: calls of blocks that ran as they are all the same."""

    graphs: int
    seconds: float
    uncompiled: int
