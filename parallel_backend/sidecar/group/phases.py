"""The phase of a running request, as data and as text for the user."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass, field


class PhaseKind(enum.Enum):
    """The kind of a phase. The value is its text; {} stands for the subject."""

    STARTING = "starting {}"
    WAKING = "waking the processes"
    LOADING = "loading {}"
    LOADED = "loaded in {} s"
    DROPPED = "{}"  # a model, and why
    SWITCHED = "switched to {}"
    FIRST_STEP = "first step"
    IMPORTING = "importing {}, once"  # packs
    COMPILING = "compiling for {}; this step takes longer"
    TRYING = "trying {}"  # a strategy and its number, such as 2 of 3
    SAMPLING = "sampling"
    SENDING_VAE = "sending the VAE to the processes"
    DECODING = "decoding"
    ENCODING = "encoding"
    SENDING_ENCODER = "sending the text encoder to the processes"
    ENCODING_TEXT = "encoding the text"
    MEASURING = "measuring the links"
    RECOVERING = "{}"  # from a crash
    MAKING_ROOM = "memory ended; going on without the other models"


@dataclass(frozen=True)
class Phase:
    """One phase of a request. `about`: its subject, such as a file's name; `size`: bytes of the file that it reads, 0
    for none (each rank's heartbeat has the progress); `started`: time.monotonic() of its beginning."""

    kind: PhaseKind
    about: str = ""
    size: int = 0
    started: float = field(default_factory=time.monotonic, compare=False)

    @property
    def text(self) -> str:
        return self.kind.value.format(self.about)


OnPhase = Callable[[Phase], None]
ShowPhase = Callable[[str], None]
