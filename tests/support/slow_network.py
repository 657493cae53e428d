"""Hosts in network namespaces of one computer, joined by a slow network that loses packets: a thread of the test passes
IPv4 packets between them with a delay."""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import itertools
import os
import random
import selectors
import shutil
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Mapping

import pytest

LATENCY = 0.02  # s, one way
LOSS = 0.01  # of the packets
_MOST_BYTES = 65536
_TUN_DEVICE = "/dev/net/tun"
_SET_INTERFACE = 0x400454CA  # TUNSETIFF, <linux/if_tun.h>
_PACKETS_ALONE = 0x0001 | 0x1000  # IFF_TUN | IFF_NO_PI


def open_tun() -> tuple[int, str]:
    """Makes a TUN device in this process's namespace and returns (descriptor, name). Closing the descriptor removes the
    device. Raises OSError."""
    descriptor = os.open(_TUN_DEVICE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        asked = struct.pack("16sH22x", b"slow%d", _PACKETS_ALONE)
        named = fcntl.ioctl(descriptor, _SET_INTERFACE, asked)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, named[:16].rstrip(b"\0").decode()


class SlowNetwork:
    """A network between hosts. `hosts`: by address, the descriptor for reading a host's packets and writing packets to
    it; the network closes them."""

    def __init__(self, hosts: Mapping[str, int]) -> None:
        self._hosts = {socket.inet_aton(address): descriptor for address, descriptor in hosts.items()}
        self._draw = random.Random(17)  # decides which packets are lost
        self._cut_off: set[bytes] = set()
        self._due: list[tuple[float, int, int, bytes]] = []  # (due time, order, target's descriptor, packet)
        self._order = itertools.count()
        self._end = os.eventfd(0, os.EFD_NONBLOCK)
        self.passed = self.lost = self.stopped = 0  # packets
        self._thread = threading.Thread(target=self._run, name="slow-network", daemon=True)
        self._thread.start()

    def cut_off(self, address: str) -> None:
        """Drops all packets from and to this address from now on, without an error message to any host."""
        self._cut_off.add(socket.inet_aton(address))

    def join(self, address: str) -> None:
        self._cut_off.discard(socket.inet_aton(address))

    def close(self) -> None:
        os.eventfd_write(self._end, 1)
        self._thread.join()
        for descriptor in (*self._hosts.values(), self._end):
            os.close(descriptor)

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for descriptor in (*self._hosts.values(), self._end):
                selector.register(descriptor, selectors.EVENT_READ)
            while True:
                left = max(0.0, self._due[0][0] - time.monotonic()) if self._due else None
                ready = [key.fd for key, _ in selector.select(left)]
                if self._end in ready:
                    return
                for descriptor in ready:
                    self._take(descriptor)
                self._deliver()

    def _take(self, descriptor: int) -> None:
        """Reads all packets that one host has sent."""
        while True:
            try:
                packet = os.read(descriptor, _MOST_BYTES)
            except OSError:  # no more; or a device that is down
                return
            if not packet:
                return
            source, target = packet[12:16], packet[16:20]
            if packet[0] >> 4 != 4 or target not in self._hosts:  # for example IPv6, or a multicast
                continue
            if {source, target} & self._cut_off:
                self.stopped += 1
                continue
            if self._draw.random() < LOSS:
                self.lost += 1
                continue
            due = time.monotonic() + LATENCY
            heapq.heappush(self._due, (due, next(self._order), self._hosts[target], packet))

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._due and self._due[0][0] <= now:
            _, _, descriptor, packet = heapq.heappop(self._due)
            with contextlib.suppress(OSError):  # a host with a full buffer loses the packet
                os.write(descriptor, packet)
                self.passed += 1


FIRST = "head"


class Hosts:
    """The hosts FIRST and `names`, each with a different address. Skips the test if there can be no namespaces."""

    def __init__(self, *names: str) -> None:
        if os.geteuid() or shutil.which("ip") is None:
            pytest.skip("network namespaces need root and the ip command (Debian: apt-get install iproute2)")
        self.names = (FIRST, *names)
        self._made: list[str] = []
        devices: dict[str, int] = {}
        try:
            for name in self.names:
                _ip("netns", "add", self._space(name))
                self._made.append(name)
                devices[self.address(name)] = self._connect(name)
        except (OSError, subprocess.CalledProcessError) as error:
            for descriptor in devices.values():
                os.close(descriptor)
            self._delete()
            why = error.stderr.strip() if isinstance(error, subprocess.CalledProcessError) else error
            pytest.skip(f"this kernel makes no network namespaces or no TUN devices: {why}")
        self.network = SlowNetwork(devices)

    def _connect(self, host: str) -> int:
        descriptor, device = open_tun()
        try:
            _ip("link", "set", "dev", device, "netns", self._space(host))
            for command in (
                ("link", "set", "dev", "lo", "up"),
                ("address", "add", f"{self.address(host)}/24", "dev", device),
                ("link", "set", "dev", device, "up"),
            ):
                _ip("-n", self._space(host), *command)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def address(self, host: str) -> str:
        return f"10.213.7.{1 + self.names.index(host)}"

    def within(self, host: str) -> tuple[str, ...]:
        """Returns the beginning of a command that runs on this host."""
        return ("ip", "netns", "exec", self._space(host))

    def namespace(self, host: str) -> str:
        """Returns the path of the file that stands for this host's network namespace."""
        return f"/var/run/netns/{self._space(host)}"

    def cut_off(self, host: str) -> None:
        self.network.cut_off(self.address(host))

    def join(self, host: str) -> None:
        self.network.join(self.address(host))

    def processes(self) -> list[str]:
        """Returns the ids of all processes that run on the hosts."""
        return [pid for host in self._made for pid in _ip("netns", "pids", self._space(host)).split()]

    def remove(self) -> None:
        """Closes the network, which removes the devices, and deletes the namespaces."""
        self.network.close()
        self._delete()

    def _delete(self) -> None:
        while self._made:
            _ip("netns", "delete", self._space(self._made.pop()))

    def _space(self, host: str) -> str:
        return f"parallel-{os.getpid()}-{host}"


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout
