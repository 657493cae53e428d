"""Heartbeats: the place and the memory of each rank, on a page of memory that the parent reads unasked.

A rank that hangs answers no question, so it writes down each collective as it enters and leaves it, in memory that it
shares with the supervisor. When a deadline passes, the parent follows who waits for whom to the rank that keeps the
others waiting. A busy rank answers none either, so its progress and its memory stand there too. A beat costs about a
microsecond.

On a GPU the host enters and leaves a collective long before its device does, alike on all ranks when one device hangs.
There events in the device's stream tell where it is, and a thread that looks at them writes that down (`follow`).
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
from typing import Any, Protocol

MOST_RANKS = 64  # bits of `waits_for`
PAGE_BYTES = 4096

# What a rank may be in, by its place on the page; "" is nothing yet.
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
    "the wait for the next model call",
    "the wait for a layer",
)
# Over the control group, which holds up the host itself on every device.
_ON_THE_HOST = frozenset(name for name in COLLECTIVES if name.startswith(("the agreement", "the wait")))
STARTED = 0.001  # of a load: what it needs is imported; less is none at all
LOOK = 0.05  # s between two looks at a device's events
_CODES = {name: code for code, name in enumerate(COLLECTIVES)}
# As in RankBeat; `loaded` in thousandths.
_BEAT = struct.Struct("<BBHIQQdQQQ")
BEAT_BYTES = _BEAT.size
assert BEAT_BYTES * MOST_RANKS <= PAGE_BYTES


@dataclass(frozen=True)
class RankBeat:
    """The last that a rank wrote down. `step`: steps done in this request; `entered`: collectives so far; `waits_for`:
    the ranks of the collective, itself among them; `since`: time.monotonic() of the machine; `loaded`: how much of the
    model that it loads is there, 0 to 1; bytes on its device for weights and beside them, and sent to other ranks."""

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
    """What the host, or its device, is in or was in last: a collective's code and the bits of its ranks."""

    collective: tuple[int, int] = (0, 0)
    inside: bool = False
    entered: int = 0  # so far


class DeviceEvent(Protocol):
    """A mark in the stream of a device's work (torch.cuda.Event)."""

    def record(self) -> None: ...

    def query(self) -> bool:
        """Whether the device has passed it."""

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds of the device from this mark to a later one; it has passed both."""


class Heartbeat:
    """This process's own beats; kept to itself until `share`. `observer` sees each collective before it is entered."""

    def __init__(self) -> None:
        self._page: mmap.mmap | bytearray = bytearray(PAGE_BYTES)
        self._offset = 0
        self._asked = (0, 0)  # collective and ranks of `inside`
        self._host, self._device = _Place(), _Place()
        self._make_event: Callable[[], DeviceEvent] | None = None
        # Marks that the device has not passed: the collective and ranks that it enters there, or None where it leaves,
        # and the step that this belongs to.
        self._ahead: deque[tuple[DeviceEvent, tuple[int, int] | None, int]] = deque()
        self._looking = threading.Lock()  # `look` is for any thread
        self._entered = 0.0  # time.perf_counter() of the host
        self._entered_on_device: DeviceEvent
        self._given = 0  # steps of the request whose work is behind the host, however far its device is
        self._inside_s: defaultdict[int, float] = defaultdict(float)  # by step
        self._step = 0
        self._loaded = 0
        self._holds = (0, 0, 0)
        self.observer: Callable[[str, int], None] | None = None

    def share(self, descriptor: int, rank: int) -> None:
        """Goes on in the page that was inherited under `descriptor`, which is closed."""
        self._page = mmap.mmap(descriptor, PAGE_BYTES)
        os.close(descriptor)
        self._offset = rank * _BEAT.size

    def follow(self, make_event: Callable[[], DeviceEvent], choose_device: Callable[[], None]) -> None:
        """From now on, collectives are entered and left where a device does so. Starts a thread, which begins with
        `choose_device()`: CUDA gives each thread the first device, and whatever is asked there takes memory of it."""
        self._make_event = make_event
        threading.Thread(
            target=self._look_for_ever, args=(choose_device,), name="heartbeat", daemon=True
        ).start()

    def look(self) -> None:
        """Writes down how far the device is."""
        with self._looking:
            while self._ahead and self._ahead[0][0].query():
                event, entered, step = self._ahead.popleft()
                self._go(self._device, entered)
                if entered is None:
                    self._inside_s[step] += self._entered_on_device.elapsed_time(event) / 1000
                else:
                    self._entered_on_device = event

    def begin(self) -> None:
        """A request begins: its steps are counted, and timed, from none."""
        self._given = 0
        self._inside_s.clear()
        self.steps_done(0)

    def step_given(self) -> None:
        """The host has given all of a step to its device; collectives belong to the next one from now on."""
        self._given += 1

    def inside_seconds(self, steps: int) -> tuple[float, ...]:
        """Seconds of each of the request's first `steps` steps that this rank, or its device, was in collectives: while
        they sent, or while other ranks were not there yet. Its device has done them all."""
        if self._make_event is not None:
            self.look()
        return tuple(self._inside_s[step] for step in range(steps))

    def _look_for_ever(self, choose_device: Callable[[], None]) -> None:
        choose_device()
        while True:
            time.sleep(LOOK)
            try:
                self.look()
            except RuntimeError:  # the device failed, of which the host hears as well
                return

    def steps_done(self, count: int) -> None:
        """Writes down that `count` steps of the request that runs are behind this rank; 0 as it begins."""
        self._step = count
        self._write()
        if self.observer is not None and count:
            self.observer("step", count)

    def loading(self, part: float) -> None:
        """Writes down how much of the model that this rank loads is there, 0 to 1: 0 while it imports what it needs to
        load, from STARTED on while it reads."""
        self._loaded = int(1000 * min(max(part, 0.0), 1.0))
        self._write()

    def holds(self, weight_bytes: int, working_bytes: int, sent_bytes: int) -> None:
        """Writes down the bytes on this rank's device, and those sent to others since it began."""
        self._holds = (weight_bytes, working_bytes, sent_bytes)
        self._write()

    def point(self, name: str) -> None:
        """A place that is no collective, for the observer alone."""
        if self.observer is not None:
            self.observer(name, self._step)

    def inside(self, collective: str, ranks: tuple[int, ...] | range) -> Heartbeat:
        """`with inside(...):` around what blocks; not nested."""
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
        """Into a collective, or out of it."""
        place.inside = entered is not None
        if entered is not None:
            place.collective = entered
            place.entered += 1
        self._write()

    def _write(self) -> None:
        """Where the host waits, its device has often got less far, and that is what others wait for."""
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
    """The page of a group as its parent sees it; owns the descriptor that the ranks inherit, until `close`."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("parallel-backend-heartbeat", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, PAGE_BYTES)
        self._page = mmap.mmap(self.descriptor, PAGE_BYTES)

    def read(self, rank: int) -> RankBeat:
        """Whatever a rank wrote there is read as numbers; an unknown collective is none."""
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
        """What a rank wrote down, for the head of a cluster: its time as an age."""
        *beat, since, weights, working, sent = _BEAT.unpack_from(self._page, rank * _BEAT.size)
        return _BEAT.pack(*beat, time.monotonic() - since, weights, working, sent)

    def copy_in(self, rank: int, beat: bytes) -> None:
        """Writes down what `copy_out` of another machine gave. Raises struct.error for another size."""
        *before, age, weights, working, sent = _BEAT.unpack(beat)
        since = time.monotonic() - max(age, 0.0)
        _BEAT.pack_into(self._page, rank * _BEAT.size, *before, since, weights, working, sent)

    def close(self) -> None:
        self._page.close()
        os.close(self.descriptor)


def find_laggard(beats: Sequence[RankBeat], silent: Collection[int] | None = None) -> int | None:
    """The rank that keeps the others waiting: from a rank in a collective to one that has not joined it, and on.

    `silent`: the ranks that still owe an answer, by default all; those that gave theirs are in no collective either.

    Where all are in the same one, or wait for each other in a circle, or none is in any, the one that has entered the
    fewest. None where several have: to blame one of them would be to guess.
    """
    ranks = range(len(beats)) if silent is None else sorted(silent)
    for start in ranks:
        rank, seen = start, set()
        while beats[rank].inside and rank not in seen:
            seen.add(rank)
            absent = [r for r in sorted(beats[rank].waits_for) if r in ranks and not _meet(beats, rank, r)]
            # One in no collective at all is the end of the chain.
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
    """The place of `rank` and who waits for it, for an error message; empty when it wrote nothing down."""
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
