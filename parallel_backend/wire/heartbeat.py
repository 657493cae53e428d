"""Heartbeats: the place and memory of each rank, on a page of shared memory that the parent reads at any time.

A rank that hangs cannot answer, so it records each collective as it enters and leaves it. When a deadline passes, the
parent follows who waits for whom to the rank that keeps the others waiting. A busy rank cannot answer either, so the
page also has its progress and its memory. A beat costs about a microsecond.

On a GPU the host enters and leaves a collective long before its device does. If one device hangs, all hosts look the
same. So on a GPU, events in the device's stream tell where the device is, and a thread polls and records them
(`follow`).
"""

from __future__ import annotations

import functools
import mmap
import os
import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.cuda import Event

MOST_RANKS = 64  # bits in `waits_for`
PAGE_BYTES = 4096

# What a rank may be inside of, by its code on the page; "" means nothing yet.
COLLECTIVES = (
    "",
    "an all-to-all",
    "a ring step",
    "a PipeFusion hop",
    "an all-gather",
    "a broadcast",
    "an all-reduce",
    "a gather of weights",
    "an exchange of edge rows",
    "xfuser's attention",
    "the agreement after a step",
    "the agreement on a strategy",
    "the agreement on a load",
    "the agreement on a job",
    "the agreement on a model call",
    "the wait for a model call",
    "the wait for a layer",
)
# These use the control group, which blocks the host itself on every device.
_ON_THE_HOST = frozenset(name for name in COLLECTIVES if name.startswith(("the agreement", "the wait")))
STARTED = 0.001  # of a load: imports are done and reading starts; less means that nothing is read yet
LOOK = 0.05  # seconds between two polls of a device's events
_CODES = {name: code for code, name in enumerate(COLLECTIVES)}
# The fields of RankBeat; `loaded` in thousandths.
_BEAT = struct.Struct("<BBHIQQdQQQ")
BEAT_BYTES = _BEAT.size
assert BEAT_BYTES * MOST_RANKS <= PAGE_BYTES


@dataclass(frozen=True)
class RankBeat:
    """A rank's latest record. `step`: finished steps of the request; `entered`: collectives so far; `waits_for`: the
    ranks of the collective, with its own; `since`: the machine's time.monotonic() at the record; `loaded`: share of the
    model that is loaded, 0 to 1; bytes on its device for weights and for other data, and bytes sent to other ranks."""

    inside: bool
    collective: str
    step: int
    entered: int
    waits_for: frozenset[int]
    since: float
    loaded: float = 0.0
    weight_bytes: int = 0
    working_bytes: int = 0
    sent_bytes: int = 0


@dataclass
class _Place:
    """The current or last collective of the host, or of its device: the collective's code and the bits of its ranks."""

    collective: tuple[int, int] = (0, 0)
    inside: bool = False
    entered: int = 0  # collectives so far


class Heartbeat:
    """Records this process's beats, in private memory until `share`. `observer`: called before each collective."""

    def __init__(self) -> None:
        self._page: mmap.mmap | bytearray = bytearray(PAGE_BYTES)
        self._offset = 0
        self._asked = (0, 0)  # collective code and rank bits of the last `inside`
        self._host, self._device = _Place(), _Place()
        self._make_event: Callable[[], Event] | None = None
        # Marks that the device has not passed yet: (event, collective and ranks that it enters there or None if it
        # leaves, the step that this belongs to).
        self._ahead: deque[tuple[Event, tuple[int, int] | None, int]] = deque()
        self._looking = threading.Lock()  # any thread may call `look`
        self._entered = 0.0  # the host's time.perf_counter()
        self._entered_on_device: Event
        self._given = 0  # steps of the request that the host has submitted, however far its device is
        self._inside_s: defaultdict[int, float] = defaultdict(float)  # by step
        self._step = 0
        self._loaded = 0
        self._holds = (0, 0, 0)
        self.observer: Callable[[str, int], None] | None = None

    def share(self, descriptor: int, rank: int) -> None:
        """Uses the inherited page under `descriptor` from now on, and closes the descriptor."""
        self._page = mmap.mmap(descriptor, PAGE_BYTES)
        os.close(descriptor)
        self._offset = rank * _BEAT.size

    def follow(self, make_event: Callable[[], Event], choose_device: Callable[[], None]) -> None:
        """Records collectives when the device enters and leaves them, from now on. Starts a thread that first calls
        `choose_device()`: CUDA gives each new thread the first device, and any call there takes memory of it."""
        self._make_event = make_event
        threading.Thread(
            target=self._look_for_ever, args=(choose_device,), name="heartbeat", daemon=True
        ).start()

    def look(self) -> None:
        """Records how far the device is."""
        with self._looking:
            while self._ahead and self._ahead[0][0].query():
                event, entered, step = self._ahead.popleft()
                self._go(self._device, entered)
                if entered is None:
                    self._inside_s[step] += self._entered_on_device.elapsed_time(event) / 1000
                else:
                    self._entered_on_device = event

    def begin(self) -> None:
        """Starts a request: its steps are counted and timed from zero."""
        self._given = 0
        self._inside_s.clear()
        self.steps_done(0)

    def step_given(self) -> None:
        """Notes that the host has submitted a whole step to its device; later collectives belong to the next step."""
        self._given += 1

    def inside_seconds(self, steps: int) -> tuple[float, ...]:
        """Returns the seconds in collectives, of this rank or its device, in each of the request's first `steps` steps:
        time to send, and time to wait for other ranks. The device must have finished these steps."""
        if self._make_event is not None:
            self.look()
        return tuple(self._inside_s[step] for step in range(steps))

    def _look_for_ever(self, choose_device: Callable[[], None]) -> None:
        choose_device()
        while True:
            time.sleep(LOOK)
            try:
                self.look()
            except RuntimeError:  # the device failed, and the host gets an error as well
                return

    def steps_done(self, count: int) -> None:
        """Records that this rank has finished `count` steps of the running request; 0 at its start."""
        self._step = count
        self._write()
        if self.observer is not None and count:
            self.observer("step", count)

    def loading(self, part: float) -> None:
        """Records the share of the model that this rank has loaded, 0 to 1: 0 during imports, STARTED or more while it
        reads."""
        self._loaded = int(1000 * min(max(part, 0.0), 1.0))
        self._write()

    def holds(self, weight_bytes: int, working_bytes: int, sent_bytes: int) -> None:
        """Records the bytes on this rank's device, and the bytes sent to others since the rank started."""
        self._holds = (weight_bytes, working_bytes, sent_bytes)
        self._write()

    def point(self, name: str) -> None:
        """Reports a place that is no collective to the observer."""
        if self.observer is not None:
            self.observer(name, self._step)

    def inside(self, collective: str, ranks: tuple[int, ...] | range) -> Heartbeat:
        """Returns a context manager for code that blocks in `collective` with `ranks`; not nested."""
        if self.observer is not None:
            self.observer(collective, self._step)
        self._asked = (_CODES[collective], _bits(ranks))
        return self

    def __enter__(self) -> None:
        if self._is_on_device():
            self._mark(self._asked)
        else:
            self._entered = time.perf_counter()
            self._go(self._host, self._asked)

    def __exit__(self, *error: object) -> None:
        if self._is_on_device():
            self._mark(None)
        else:
            self._inside_s[self._given] += time.perf_counter() - self._entered
            self._go(self._host, None)

    def _is_on_device(self) -> bool:
        return self._make_event is not None and COLLECTIVES[self._asked[0]] not in _ON_THE_HOST

    def _mark(self, entered: tuple[int, int] | None) -> None:
        assert self._make_event is not None, "it follows a device"
        event = self._make_event()
        event.record()
        self._ahead.append((event, entered, self._given))

    def _go(self, place: _Place, entered: tuple[int, int] | None) -> None:
        """Enters a collective, or leaves it if `entered` is None."""
        place.inside = entered is not None
        if entered is not None:
            place.collective = entered
            place.entered += 1
        self._write()

    def _write(self) -> None:
        """Writes the beat: the device's collective if it is in one, since others wait for the device, not its host."""
        shown = self._device if self._device.inside or not self._host.entered else self._host
        collective, ranks = shown.collective
        _BEAT.pack_into(
            self._page,
            self._offset,
            shown.inside,
            collective,
            self._loaded,
            self._step,
            self._host.entered + self._device.entered,
            ranks,
            time.monotonic(),
            *self._holds,
        )


@functools.cache
def _bits(ranks: tuple[int, ...] | range) -> int:
    return sum(1 << rank for rank in ranks)


heartbeat = Heartbeat()  # a process is one rank


class Page:
    """The page of a group on the parent's side; owns the descriptor that the ranks inherit, until `close`."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("parallel-backend-heartbeat", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, PAGE_BYTES)
        self._page = mmap.mmap(self.descriptor, PAGE_BYTES)

    def read(self, rank: int) -> RankBeat:
        """Returns a rank's beat. Any content is read as numbers; an unknown collective becomes ""."""
        inside, code, loaded, step, entered, ranks, since, *holds = _BEAT.unpack_from(
            self._page, rank * _BEAT.size
        )
        return RankBeat(
            inside=inside == 1,
            collective=COLLECTIVES[code] if code < len(COLLECTIVES) else "",
            step=step,
            entered=entered,
            waits_for=frozenset(r for r in range(MOST_RANKS) if ranks >> r & 1),
            since=since,
            loaded=loaded / 1000,
            weight_bytes=holds[0],
            working_bytes=holds[1],
            sent_bytes=holds[2],
        )

    def copy_out(self, rank: int) -> bytes:
        """Returns a rank's record as bytes for the head of a cluster, with its time as an age."""
        *beat, since, weights, working, sent = _BEAT.unpack_from(self._page, rank * _BEAT.size)
        return _BEAT.pack(*beat, time.monotonic() - since, weights, working, sent)

    def copy_in(self, rank: int, beat: bytes) -> None:
        """Writes a record that `copy_out` returned on another machine. Raises struct.error for a wrong size."""
        *before, age, weights, working, sent = _BEAT.unpack(beat)
        since = time.monotonic() - max(age, 0.0)
        _BEAT.pack_into(self._page, rank * _BEAT.size, *before, since, weights, working, sent)

    def close(self) -> None:
        self._page.close()
        os.close(self.descriptor)


def find_laggard(beats: Sequence[RankBeat], silent: Collection[int] | None = None) -> int | None:
    """Returns the rank that keeps the others waiting: follows ranks in collectives to ranks that have not joined them.

    `silent`: the ranks that still owe an answer, by default all; ranks that answered are in no collective.

    If all are in the same collective, wait in a circle, or are in none, returns the rank that entered the fewest
    collectives; None if several did, because blaming one of them would be a guess.
    """
    ranks = range(len(beats)) if silent is None else sorted(silent)
    for start in ranks:
        rank, seen = start, set()
        while beats[rank].inside and rank not in seen:
            seen.add(rank)
            absent = [r for r in sorted(beats[rank].waits_for) if r in ranks and not _meet(beats, rank, r)]
            # A rank in no collective ends the chain.
            rank = min(absent, key=lambda r: (beats[r].inside, r), default=rank)
        if rank != start and not beats[rank].inside:
            return rank
    fewest = min(beats[rank].entered for rank in ranks)
    behind = [rank for rank in ranks if beats[rank].entered == fewest]
    return behind[0] if len(behind) == 1 else None


def _meet(beats: Sequence[RankBeat], one: int, other: int) -> bool:
    a, b = beats[one], beats[other]
    return one == other or (b.inside and a.collective == b.collective and a.waits_for == b.waits_for)


def in_words(beats: Sequence[RankBeat], rank: int) -> str:
    """Returns where `rank` is and who waits for it, for an error message; empty if it has recorded no collective."""
    beat = beats[rank]
    if not beat.collective:
        return ""
    waiting = [r for r in range(len(beats)) if r != rank and beats[r].inside and rank in beats[r].waits_for]
    if beat.inside:
        beside = [r for r in waiting if _meet(beats, rank, r)]
        words = f"inside {beat.collective}" + (f", beside {_named(beside)}" if beside else "")
    else:
        words = f"the last collective that it entered was {beat.collective}"
        if waiting:
            words += f"; missed in {beats[waiting[0]].collective} by {_named(waiting)}"
    return f"{words}, after {beat.step} step{'' if beat.step == 1 else 's'}"


def _named(ranks: Sequence[int]) -> str:
    return f"process{'es' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
