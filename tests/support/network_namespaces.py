"""Hosts in network namespaces of one computer: a bridge in the first one's, and a cable from it to each other."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

FIRST = "head"


class Hosts:
    """`names` beside FIRST, each with an address of its own. Skips the test where namespaces are not to be had."""

    def __init__(self, *names: str) -> None:
        if os.geteuid() or shutil.which("ip") is None:
            pytest.skip("network namespaces need root and the ip command (Debian: apt-get install iproute2)")
        self.names = names
        self._made: list[str] = []
        try:
            self._open(FIRST)
            self.ip(FIRST, "link", "add", "bridge", "type", "bridge")
        except subprocess.CalledProcessError as error:
            self.remove()
            pytest.skip(f"this kernel makes no network namespaces or no bridges: {error.stderr.strip()}")
        try:
            self._connect()
        except BaseException:
            self.remove()
            raise
        self.not_delayed = self._delay()

    def _open(self, host: str) -> None:
        _ip("netns", "add", self._space(host))
        self._made.append(self._space(host))
        self.ip(host, "link", "set", "dev", "lo", "up")

    def _connect(self) -> None:
        self.ip(FIRST, "address", "add", f"{self.address(FIRST)}/24", "dev", "bridge")
        self.ip(FIRST, "link", "set", "dev", "bridge", "up")
        for name in self.names:
            self._open(name)
            end = ("peer", "name", name, "netns", self._space(FIRST))
            self.ip(name, "link", "add", "cable", "type", "veth", *end)
            self.ip(FIRST, "link", "set", "dev", name, "master", "bridge", "up")
            self.ip(name, "address", "add", f"{self.address(name)}/24", "dev", "cable")
            self.ip(name, "link", "set", "dev", "cable", "up")

    def _delay(self) -> str:
        """Latency and loss on every cable, both ways; why not, where the kernel has no netem."""
        for name in self.names:
            for host, cable in ((FIRST, name), (name, "cable")):
                command = [
                    "tc",
                    "qdisc",
                    "add",
                    "dev",
                    cable,
                    "root",
                    "netem",
                    "delay",
                    "2ms",
                    "1ms",
                    "loss",
                    "0.5%",
                ]
                try:
                    subprocess.run([*self.within(host), *command], check=True, capture_output=True, text=True)
                except FileNotFoundError:
                    return "the tc command is not installed (Debian: apt-get install iproute2)"
                except subprocess.CalledProcessError as error:
                    return f"this kernel has no netem: {error.stderr.strip()}"
        return ""

    def address(self, host: str) -> str:
        return f"10.213.7.{1 + (FIRST, *self.names).index(host)}"

    def within(self, host: str) -> tuple[str, ...]:
        """The beginning of a command that is to run on this host."""
        return ("ip", "netns", "exec", self._space(host))

    def cut_off(self, host: str) -> None:
        """Its packets go nowhere, and nobody is told."""
        self.ip(FIRST, "link", "set", "dev", host, "down")

    def join(self, host: str) -> None:
        self.ip(FIRST, "link", "set", "dev", host, "up")

    def ip(self, host: str, *arguments: str) -> None:
        _ip("-n", self._space(host), *arguments)

    def remove(self) -> None:
        while self._made:
            _ip("netns", "delete", self._made.pop())

    def _space(self, host: str) -> str:
        return f"parallel-{os.getpid()}-{host}"


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
