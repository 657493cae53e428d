"""The one thread of ComfyUI's process that spawns ranks, watches them, reads what they print, and reaps them.

It is one thread that never ends, because a rank's parent-death signal fires when the *thread* that spawned it ends.
When one rank of a group dies, idle or busy, the others are killed: a peer that is stuck in a collective is only
freed by its own death.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import logging
import os
import secrets
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from ...errors import PlatformError, RankFailed
from ...wire import deadlines
from ...wire.heartbeat import Page
from ...wire.protocol import SHARED_STORE
from ...wire.transport import Link, link_pair
from ..cluster import head as clusters
from ..cluster.remote_machine import Departure, RemoteMachine
from ..process.device_lock import DeviceLocks
from ..process.environment import interpreter_flags, rank_environment
from ..process.exit_status import ExitStatus, written_stack
from ..process.rank_process import RankProcess

PACK_ROOT = Path(__file__).resolve().parents[3]
RANK_MODULE = "parallel_backend.rank"

log = logging.getLogger("parallel_backend.ranks")


@dataclass(frozen=True)
class Death:
    """The first rank of a group that ended, and how."""

    rank: int
    exit_status: ExitStatus

    def error(self) -> RankFailed:
        status = self.exit_status
        return RankFailed(self.rank, status.words, crashed=not status.repeats, reason=status.reason)


class RankGroup:
    """The ranks of one start. The supervisor owns the processes; the caller of `spawn` owns the links."""

    def __init__(self, epoch: int, devices: tuple[str, ...], locks: DeviceLocks) -> None:
        self.epoch = epoch
        self.devices = devices
        self.locks = locks
        self.alarm = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # readable once `ended` is set
        with contextlib.ExitStack() as half_made:
            half_made.callback(locks.release)
            half_made.callback(os.close, self.alarm)
            self.heartbeat = Page()
            half_made.callback(self.heartbeat.close)
            # Over this file the ranks meet.
            self.store = os.memfd_create("parallel-backend-store", os.MFD_CLOEXEC)
            half_made.pop_all()
        self.links: list[Link] = []
        self.ranks: list[RankProcess] = []
        self.machines: tuple[RemoteMachine, ...] = ()  # run the ranks; empty if this one does
        self._token = secrets.token_hex(8)  # of this start, in a store that other groups may have used
        self.death: Death | None = None
        self.ended = threading.Event()  # one rank died, or the group is being stopped
        self.gone = threading.Event()  # every rank is reaped
        self.kill_at: float | None = None
        self.abandoned = False  # the start failed half-way: the supervisor closes the group

    @property
    def world_size(self) -> int:
        return len(self.devices)

    @property
    def rendezvous(self) -> str:
        return f"{SHARED_STORE}{self._token}" if self.machines else f"/proc/self/fd/{self.store}"

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(member.pid for member in self.ranks)

    def pid_of(self, rank: int) -> int | None:
        return next((member.pid for member in self.ranks if member.rank == rank), None)

    def end(self, death: Death | None) -> None:
        """Marks the group as ended and shuts its links down. Only the first reason is kept; None: it was stopped."""
        if self.ended.is_set():
            return
        self.death = death
        self.ended.set()
        os.eventfd_write(self.alarm, 1)
        for link in self.links:
            link.shut_down()

    def close(self) -> None:
        """Closes what this process has of the group, once it is gone and no caller waits for it."""
        for link in self.links:
            link.close()
        self.heartbeat.close()
        os.close(self.store)
        os.close(self.alarm)
        self.locks.release()


class Supervisor:
    """Spawns and ends rank groups; its thread starts with the first group and lasts as long as the process."""

    def __init__(self) -> None:
        require_linux()
        self._epochs = itertools.count(1)
        self._commands: collections.deque[Callable[[], None]] = collections.deque()
        self._selector = selectors.PollSelector()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._wake, selectors.EVENT_READ, self._awake)
        self._groups: set[RankGroup] = set()
        threading.Thread(target=self._run, name="parallel-supervisor", daemon=True).start()

    def spawn(
        self, devices: tuple[str, ...], module: str = RANK_MODULE, locks: DeviceLocks | None = None
    ) -> RankGroup:
        """Starts one process per device; returns before their first message. The group takes over `locks`."""
        future: Future[RankGroup] = Future()

        def command() -> None:
            try:
                future.set_result(self._spawn(devices, module, locks or DeviceLocks()))
            except BaseException as error:  # the caller gets it, not this thread
                future.set_exception(error)

        self._submit(command)
        return future.result()

    def stack_of(self, group: RankGroup, rank: int) -> str:
        """Returns the innermost Python frames of a hanging rank, even if it holds the GIL; "" if it is silent."""
        member = next((one for one in group.ranks if one.rank == rank), None)
        if member is None:
            return ""
        with contextlib.suppress(OSError):  # it has just ended; its children get no signal
            signal.pidfd_send_signal(member.pidfd, signal.SIGUSR1)
        until = time.monotonic() + deadlines.STACK
        while time.monotonic() < until:
            time.sleep(deadlines.STACK / 10)
            if frames := written_stack(bytes(member.output)):
                return "\n".join(frames)
        return ""

    def stop(self, group: RankGroup, grace: float = deadlines.TERMINATE) -> None:
        """Ends every rank: SIGTERM, after `grace` seconds SIGKILL. Waits until all are reaped, up to REAP s longer."""
        self._submit(lambda: self._stop(group, grace))
        if not group.gone.wait(grace + deadlines.REAP):
            log.error(
                "the processes with the process ids %s do not end, even when they are killed", group.pids
            )

    def kill(self, group: RankGroup) -> None:
        """Ends every rank by SIGKILL, see `stop`."""
        self.stop(group, grace=0.0)

    def _submit(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        os.eventfd_write(self._wake, 1)

    # Everything below runs in the supervisor's thread.

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select(self._timeout()):
                try:
                    key.data()
                except Exception:
                    log.exception("the supervisor met an error and goes on")
            now = time.monotonic()
            for group in [g for g in self._groups if g.kill_at is not None and g.kill_at <= now]:
                group.kill_at = None
                _signal_all(group, signal.SIGKILL)

    def _timeout(self) -> float | None:
        times = [group.kill_at for group in self._groups if group.kill_at is not None]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _awake(self) -> None:
        os.eventfd_read(self._wake)
        while self._commands:
            self._commands.popleft()()

    def _spawn(self, devices: tuple[str, ...], module: str, locks: DeviceLocks) -> RankGroup:
        group = RankGroup(next(self._epochs), devices, locks)
        self._groups.add(group)
        try:
            if (head := clusters.head_of(devices)) is not None:
                self._take_machines(group, head)
                return group
            for rank in range(len(devices)):
                ours, theirs = link_pair()
                group.links.append(ours)
                try:
                    process = _popen(theirs, module, group, rank)
                finally:
                    theirs.close()
                try:
                    member = RankProcess(rank, process)
                except BaseException:  # out of descriptors, so it cannot be watched
                    process.kill()
                    process.communicate()
                    raise
                group.ranks.append(member)
                self._watch(group, member)
        except BaseException:
            group.abandoned = True
            self._stop(group, grace=0.0)
            if not group.ranks:
                self._bury(group)
            raise
        return group

    def _take_machines(self, group: RankGroup, head: clusters.ClusterHead) -> None:
        def departed(departure: Departure) -> None:
            self._submit(lambda: self._departed(group, departure))

        group.machines, links = head.take(group.devices, group.epoch, group.heartbeat, departed)
        group.links = [links[rank] for rank in range(group.world_size)]

    def _departed(self, group: RankGroup, departure: Departure) -> None:
        """Ends the group after a machine has left: the other ranks would wait for its ranks forever."""
        if group.gone.is_set():
            return
        words = f"the machine has left the cluster: {departure.words}"
        group.end(Death(departure.rank or 0, ExitStatus(words, "hang" if departure.silent else "link")))
        self._let_machines_go(group)

    def _let_machines_go(self, group: RankGroup) -> None:
        for machine in group.machines:
            machine.end("its group ended")
        self._bury(group)

    def _watch(self, group: RankGroup, member: RankProcess) -> None:
        def output() -> None:
            # Closed: the rank was reaped earlier in the same round of events.
            if not member.stdout.closed and not member.drain():
                self._selector.unregister(member.stdout)

        self._selector.register(member.stdout, selectors.EVENT_READ, output)
        self._selector.register(member.pidfd, selectors.EVENT_READ, lambda: self._died(group, member))

    def _died(self, group: RankGroup, member: RankProcess) -> None:
        self._selector.unregister(member.pidfd)
        if member.stdout.fileno() in self._selector.get_map():
            self._selector.unregister(member.stdout)
        first = not group.ended.is_set()
        try:
            exit_status = member.reap()
        except Exception:  # callers that wait for this group must learn that it ended
            log.exception("how process %d ended is unknown", member.rank)
            exit_status = ExitStatus("ended; how is unknown", "exit")
        group.ranks = [other for other in group.ranks if other is not member]
        if first:
            _signal_all(group, signal.SIGKILL)
            group.end(Death(member.rank, exit_status))
            log.warning(
                "process %d on %s ended: %s", member.rank, group.devices[member.rank], exit_status.words
            )
        if not group.ranks:
            self._bury(group)

    def _stop(self, group: RankGroup, grace: float) -> None:
        if group.gone.is_set():
            return
        group.end(None)
        if group.machines:
            self._let_machines_go(group)
            return
        _signal_all(group, signal.SIGTERM if grace else signal.SIGKILL)
        group.kill_at = time.monotonic() + grace

    def _bury(self, group: RankGroup) -> None:
        self._groups.discard(group)
        group.gone.set()
        if group.abandoned:
            group.close()


_supervisor: Supervisor | None = None
_supervisor_pid = 0
_supervisor_lock = threading.Lock()


def get_supervisor() -> Supervisor:
    """Returns this process's supervisor. A forked child gets its own: it may not touch the ranks of its parent."""
    global _supervisor, _supervisor_pid
    with _supervisor_lock:
        if _supervisor is None or _supervisor_pid != os.getpid():
            _supervisor, _supervisor_pid = Supervisor(), os.getpid()
        return _supervisor


def require_linux() -> None:
    """Raises PlatformError on other systems: ranks need Linux."""
    if sys.platform != "linux":
        raise PlatformError(
            f"Parallel sampling needs Linux; this is {sys.platform}. On Windows, run ComfyUI inside WSL2."
        )


def _popen(link: Link, module: str, group: RankGroup, rank: int) -> subprocess.Popen[bytes]:
    # -u: unbuffered, so that the last output of a dying rank reaches its pipe.
    command = [
        sys.executable,
        "-u",
        *interpreter_flags(),
        "-m",
        module,
        "--fd",
        str(link.fileno()),
        "--parent",
        str(os.getpid()),
    ]
    page = group.heartbeat.descriptor
    command += ["--epoch", str(group.epoch), "--heartbeat", str(page)]
    return subprocess.Popen(
        command,
        cwd=PACK_ROOT,  # `-m` looks there first, whatever the folder is called
        env=rank_environment(os.environ, PACK_ROOT, group.devices),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=(link.fileno(), page, group.store, *group.locks.of(group.devices[rank])),
        start_new_session=True,  # Ctrl-C in ComfyUI's terminal is ComfyUI's to handle
    )


def _signal_all(group: RankGroup, number: int) -> None:
    for member in group.ranks:
        member.signal(number)
