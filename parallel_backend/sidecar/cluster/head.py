"""The clusters of which this process is the head: it admits machines, notes which leave, assigns them to groups.

A head listens as soon as its cluster is known or used. A client must present the machines' certificate within
deadlines.ADMIT. The connections that have not joined yet are limited, in total and from one address.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import logging
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...cluster.channel import Kind
from ...cluster.endpoint import NAME, Endpoint, find_head, known_clusters
from ...cluster.handshake import Join, receive_first, send_first, unpack, versions
from ...cluster.tls import make_context, secure
from ...devices import find_clusters_by, machine_of
from ...errors import Cancelled, DeviceError, ParallelError, TransportError
from ...wire import deadlines
from ...wire.heartbeat import MOST_RANKS, Page
from ...wire.transport import Link
from .remote_machine import Departure, OnDeparture, RemoteMachine

MOST_AT_THE_DOOR, MOST_FROM_ONE = 32, 4  # connections that have not joined yet, in total and from one address
_MAX_DEVICE_BYTES = 2**44  # 16 TiB, more than any device or host has
_SAY = 10.0  # s between two log lines about refused connections

log = logging.getLogger("parallel_backend.cluster")


@dataclass(frozen=True)
class _Gone:
    """A machine that has left. `words`: why and when; `at`: time.monotonic() of that; `silent`: as in Departure."""

    devices: tuple[str, ...]
    words: str
    at: float
    silent: bool

    @property
    def is_absent(self) -> bool:
        """True if it was cut off or left long ago; else it may rejoin soon, as torchrun restarts its processes."""
        return self.silent or time.monotonic() - self.at > deadlines.MACHINES


class ClusterHead:
    """The head of one cluster; listens until `close`. Raises DeviceError if it cannot listen on its port."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self._context = make_context(endpoint)
        self._machines: dict[str, RemoteMachine] = {}
        self._gone: dict[str, _Gone] = {}
        self._changed = threading.Condition()
        self._door: collections.Counter[str] = collections.Counter()  # those not joined, by address
        self._refused, self._logged_at = 0, float("-inf")
        self._closed = False
        try:
            self._listener = socket.create_server((endpoint.address, endpoint.port), backlog=64)
        except OSError as error:
            raise DeviceError(
                f"The cluster {endpoint.cluster} cannot be served: port {endpoint.port} of "
                f"{endpoint.address or 'this computer'} cannot be opened ({error.strerror}). A ComfyUI, or a "
                f"doctor or bench, may be its head already; only one can be, so end that one first."
            ) from None
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._listen, name=f"cluster-{endpoint.cluster}", daemon=True).start()

    # The machines of the cluster.

    def devices(self) -> tuple[str, ...]:
        """Returns the devices of all machines, sorted by machine name; of those that left, until `drop_departed`."""
        with self._changed:
            found = {name: gone.devices for name, gone in self._gone.items()}
            found |= {name: machine.devices for name, machine in self._machines.items()}
        return tuple(device for name in sorted(found) for device in found[name])

    def memory_of(self, device: str) -> int:
        with self._changed:
            return next((m.memory[device] for m in self._machines.values() if device in m.memory), 0)

    def departure_reason(self, machine: str) -> str:
        """Returns in words why a machine left; "" while it is connected or about to rejoin."""
        with self._changed:
            gone = self._gone.get(machine)
        return gone.words if gone is not None and gone.is_absent else ""

    def drop_departed(self) -> None:
        with self._changed:
            self._gone = {name: gone for name, gone in self._gone.items() if not gone.is_absent}

    def wait_for(self, devices: Sequence[str], cancelled: Callable[[], bool]) -> None:
        """Waits until the machines of these devices have joined and serve no group. Raises Cancelled; DeviceError after
        deadlines.MACHINES."""
        until = time.monotonic() + deadlines.MACHINES
        with self._changed:
            while missing := [name for name in _machines_of(devices) if not self._is_free(name)]:
                if cancelled():
                    raise Cancelled("The request was cancelled while it waited for machines.")
                if time.monotonic() > until:
                    raise self._missing(missing)
                self._changed.wait(deadlines.POLL)

    def _is_free(self, name: str) -> bool:
        return name in self._machines and self._machines[name].on_departure is None

    def _missing(self, names: Sequence[str]) -> DeviceError:
        """Returns an error that names one machine: one that was cut off, else the one whose connection closed first.
        The processes of the others ended because their group did."""
        gone = [name for name in names if name in self._gone]
        gone.sort(key=lambda name: (not self._gone[name].silent, self._gone[name].at))
        name = (gone or list(names))[0]
        why = "serves other processes of this ComfyUI; stop those (sidebar tab Parallel, Stop)."
        if name not in self._machines:
            left = self._gone[name].words if name in self._gone else "it has not joined"
            why = (
                f"is not there ({left}; waited {deadlines.MACHINES:g} s). See that torchrun runs on it; until it is "
                f"back, mode auto of Strategy Selector does without it."
            )
        return DeviceError(f"Machine {name} of the cluster {self.endpoint.cluster} {why}")

    def take(
        self, devices: Sequence[str], epoch: int, page: Page, on_departure: OnDeparture
    ) -> tuple[tuple[RemoteMachine, ...], dict[int, Link]]:
        """Assigns the machines of `devices` to one group; returns them and its links by rank. Raises DeviceError if one
        is missing or busy. `page`: gets the ranks' heartbeats; `on_departure`: called if a machine leaves."""
        names = _machines_of(devices)
        ranks = {device: rank for rank, device in enumerate(devices)}
        with self._changed:
            missing = [name for name in names if not self._is_free(name)]
            if missing:
                raise self._missing(missing)
            machines = tuple(self._machines[name] for name in names)
            for machine in machines:
                machine.on_departure = on_departure
        links: dict[int, Link] = {}
        for machine in machines:
            links |= machine.start(epoch, ranks, page)
        return machines, links

    def _departed(self, machine: RemoteMachine, departure: Departure) -> None:
        words = f"{departure.words}, at {time.strftime('%H:%M:%S')}"
        with self._changed:
            if self._machines.get(machine.name) is machine:
                del self._machines[machine.name]
                self._gone[machine.name] = _Gone(machine.devices, words, time.monotonic(), departure.silent)
            self._changed.notify_all()
        log.info("machine %s left the cluster %s: %s", machine.name, self.endpoint.cluster, departure.words)
        if machine.on_departure is not None:
            machine.on_departure(departure)

    # Connections that have not joined yet.

    def _listen(self) -> None:
        while True:
            try:
                connection, (address, *_) = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(deadlines.POLL)  # out of file descriptors for the moment
                continue
            with self._changed:
                full = self._door.total() >= MOST_AT_THE_DOOR or self._door[address] >= MOST_FROM_ONE
                if not full:
                    self._door[address] += 1
            if full:
                connection.close()
                self._refuse(address, "too many connections that have not joined")
                continue
            threading.Thread(target=self._admit, args=(connection, address), daemon=True).start()

    def _admit(self, plain: socket.socket, address: str) -> None:
        """Handles one new connection: TLS handshake, first frame, welcome or refusal."""
        connection: ssl.SSLSocket | None = None
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = secure(plain, self.endpoint, self._context, deadlines.ADMIT)
            kind, text = receive_first(connection, deadlines.ADMIT)
            if kind is not Kind.JOIN:
                raise TransportError("the first frame is no machine's")
            join = unpack(text, Join)
            if reason := self._check(join):
                send_first(connection, Kind.REFUSED, reason.encode())
                raise TransportError(reason)
            send_first(connection, Kind.WELCOME)
            self._welcome(connection, join)
        except (OSError, TransportError) as error:
            if connection is not None:
                connection.close()
            self._refuse(address, str(error))
        finally:
            with self._changed:
                self._door[address] -= 1
                self._door += collections.Counter()  # drops addresses with a count of 0

    def _check(self, join: Join) -> str:
        """Returns why a machine is refused; "" if it is accepted."""
        if not NAME.fullmatch(join.machine) or not 0 < len(join.devices) <= MOST_RANKS:
            return "its name or its number of processes is not allowed"
        if len(join.memory) != len(join.devices) or any(not _is_device(name) for name in join.devices):
            return "its devices are not understood"
        if len(set(join.devices)) != len(join.devices):
            return "it names a device twice"
        if not all(0 <= size <= _MAX_DEVICE_BYTES for size in join.memory):
            return f"a device's memory lies between 0 and {_MAX_DEVICE_BYTES} bytes"
        theirs, ours = (join.protocol, join.python, join.torch), versions()
        if theirs != ours:
            return (
                f"machine {join.machine} runs protocol {theirs[0]}, Python {theirs[1]}, torch {theirs[2]}, and ComfyUI "
                f"runs protocol {ours[0]}, Python {ours[1]}, torch {ours[2]}; make them alike"
            )
        with self._changed:
            known = self._machines.get(join.machine)
        if known is not None and known.was_heard_lately:
            return f"a machine called {join.machine} is there already; start this one with --machine and another name"
        return ""

    def _welcome(self, connection: ssl.SSLSocket, join: Join) -> None:
        machine = RemoteMachine(connection, join, self.endpoint.cluster, self._departed)
        with self._changed:
            before = self._machines.get(join.machine)
            self._machines[join.machine] = machine
            self._gone.pop(join.machine, None)
            machine.begin()
            closed = self._closed
            self._changed.notify_all()
        if before is not None:  # a stale connection, silent for a while
            before.end("it joined again")
        if closed:
            machine.end("the head ends")
        log.info(
            "machine %s joined the cluster %s from %s with %s",
            machine.name,
            self.endpoint.cluster,
            machine.address,
            ", ".join(join.devices),
        )

    def _refuse(self, address: str, why: str) -> None:
        """Logs refused connections, at most one line every _SAY seconds."""
        self._refused += 1
        if time.monotonic() - self._logged_at > _SAY:
            log.warning(
                "cluster %s: refused %d connection(s), the last one from %s: %s",
                self.endpoint.cluster,
                self._refused,
                address,
                why,
            )
            self._refused, self._logged_at = 0, time.monotonic()

    def close(self) -> None:
        """Closes all connections. The machines' processes end and, restarted by torchrun, dial until a head is up."""
        with self._changed:
            self._closed = True
            machines = tuple(self._machines.values())
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that listens
        self._listener.close()
        for machine in machines:
            machine.end("the head ends")


def _machines_of(devices: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(machine_of(device).partition("/")[2] for device in devices))


def _is_device(name: str) -> bool:
    kind, _, index = name.partition(":")
    return kind in ("cuda", "cpu") and index.isascii() and index.isdecimal() and len(index) < 4


# The heads of this process.

_heads: dict[str, ClusterHead] = {}
_lock = threading.Lock()


def open_head(cluster: str) -> ClusterHead:
    """Returns the head of this cluster, which listens from now on. Raises DeviceError, or PlatformError if the
    certificates in its file are damaged."""
    with _lock:
        if cluster not in _heads:
            _heads[cluster] = ClusterHead(find_head(cluster))
            log.info("cluster %s: waiting for machines on port %d", cluster, _heads[cluster].port)
        return _heads[cluster]


def find_by_name() -> None:
    """Allows cluster:NAME as a set of devices. A head starts to listen when it is first used."""
    find_clusters_by(_devices_of, _memory_of)


def serve_known() -> None:
    """Calls find_by_name, and listens from now on for the machines of all clusters that this computer knows."""
    find_by_name()
    for cluster in known_clusters():
        try:
            open_head(cluster)
        except ParallelError as error:
            log.warning("parallel sampling: %s", error)


def served() -> dict[str, tuple[str, ...]]:
    """Returns the devices of each cluster whose head this process is; empty if no machine has joined it."""
    return {cluster: head.devices() for cluster, head in tuple(_heads.items())}


def _devices_of(cluster: str) -> tuple[str, ...]:
    head = open_head(cluster)
    devices = head.devices()
    if not devices:
        raise DeviceError(
            f"devices 'cluster:{cluster}': no machine has joined it yet. Start torchrun on each machine "
            f"(docs/deployment.md, Several machines); this computer waits for them on port {head.port}.",
            nearest=(("devices", "all"),),
        )
    return devices


def _memory_of(device: str) -> int:
    cluster = machine_of(device).partition("/")[0]
    return _heads[cluster].memory_of(device) if cluster in _heads else 0


def departure_reason(device: str) -> str:
    """Returns in words why the machine of `device` left its cluster; "" if it has not, or for a local device."""
    cluster, _, machine = machine_of(device).partition("/")
    return _heads[cluster].departure_reason(machine) if cluster in _heads else ""


def drop_departed() -> None:
    """Removes machines that have left from their clusters' devices, until they join again."""
    for head in tuple(_heads.values()):
        head.drop_departed()


def head_of(devices: Sequence[str]) -> ClusterHead | None:
    """Returns the head of the devices' cluster; None for devices of this computer. Raises DeviceError unless all are of
    one cluster."""
    clusters = {machine_of(device).partition("/")[0] for device in devices}
    if clusters == {""}:
        return None
    if len(clusters) > 1:
        raise DeviceError(f"{', '.join(devices)}: one group has devices of one cluster and no others.")
    if len(devices) > MOST_RANKS:
        raise DeviceError(
            f"{len(devices)} devices: a group has {MOST_RANKS} at most; name some of them, with commas."
        )
    return open_head(clusters.pop())


def close_all() -> None:
    """Closes the heads of this process."""
    with _lock:
        while _heads:
            _heads.popitem()[1].close()


_owner = os.getpid()


def _at_exit() -> None:
    if os.getpid() == _owner:  # a forked child must leave its parent's connections alone
        close_all()


atexit.register(_at_exit)
