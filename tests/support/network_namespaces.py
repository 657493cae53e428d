"""Hosts in network namespaces of one computer, joined by a slow network that loses packets (slow_network.py)."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from slow_network import SlowNetwork, open_tun

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
