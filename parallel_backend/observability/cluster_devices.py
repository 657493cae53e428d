"""Resolves devices for a command: this process is the head of a cluster while the command runs."""

from __future__ import annotations

import time
from collections.abc import Callable

from ..devices import cluster_of, resolve_devices
from ..wire import deadlines


def resolve_for_command(text: str, say: Callable[[str], None]) -> tuple[str, ...]:
    """Returns resolve_devices(text) after waiting for the cluster's machines; reports the wait with `say`. For
    `cluster:NAME`, waits until no more machines join. Raises DeviceError."""
    cluster = cluster_of(text)
    if not cluster:
        return resolve_devices(text)
    from ..sidecar.cluster import head as clusters  # late: this computer's own devices need no certificates

    clusters.find_by_name()
    head = clusters.open_head(cluster)
    say(f"waiting on port {head.port} for the machines of the cluster {cluster}")
    names = set(text.lower().replace(",", " ").replace(";", " ").split())
    until, found, since = time.monotonic() + deadlines.MACHINES, head.devices(), time.monotonic()
    while time.monotonic() < until and (not found or time.monotonic() - since < deadlines.GATHER):
        time.sleep(deadlines.POLL)
        if (now := head.devices()) != found:
            found, since = now, time.monotonic()
        if names <= set(found):
            break
    return resolve_devices(text)
