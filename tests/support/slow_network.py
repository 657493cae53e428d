"""A network in a thread of the test: it passes IPv4 packets between hosts with a delay, and loses some of them."""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import itertools
import os
import random
import selectors
import socket
import struct
import threading
import time
from collections.abc import Mapping

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
    it; the network closes them. `seed`: decides which packets are lost."""

    def __init__(self, hosts: Mapping[str, int], seed: int = 17) -> None:
        self._hosts = {socket.inet_aton(address): descriptor for address, descriptor in hosts.items()}
        self._draw = random.Random(seed)
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
