"""Counts of a process's open descriptors by kind: files by path, sockets by the port that they listen on or reach."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

# Clients decide how many of these there are: a front door keeps some connections open for its next requests.
CLIENTS = "TCP connection that its client keeps open"
_ESTABLISHED, _LISTENS = "01", "0A"  # socket states, <linux/tcp_states.h>


def kinds_of(pid: int) -> Counter[str]:
    """Returns the number of open descriptors of the process `pid`, by kind."""
    sockets = _sockets(pid)
    found: Counter[str] = Counter()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(descriptor.readlink())
        except OSError:  # closed in the meantime
            continue
        kind = re.sub(r"^(socket|pipe|net):.*", r"\1", target)  # drops the inode number
        found[sockets.get(target, kind)] += 1
    return found


def added(before: Counter[str], after: Counter[str]) -> str:
    """Returns in words the descriptors that `after` has in addition to those of `before`."""
    more = after - before
    return ", ".join(f"{count} x {kind}" for kind, count in sorted(more.items()))


def _sockets(pid: int) -> dict[str, str]:
    """Maps "socket:[inode]" to a description, for each TCP socket in the process's network namespace."""
    rows = []
    for table in ("tcp", "tcp6"):
        path = Path(f"/proc/{pid}/net/{table}")
        rows += [line.split() for line in path.read_text().splitlines()[1:]] if path.exists() else []
    listening = {_port(words[1]) for words in rows if words[3] == _LISTENS}
    found = {}
    for words in rows:
        own, other = _port(words[1]), _port(words[2])
        if words[3] == _LISTENS:
            what = f"TCP port {own}"
        elif own not in listening:
            what = f"TCP connection to port {other}"
        else:
            what = CLIENTS if words[3] == _ESTABLISHED else "TCP connection that its client has closed"
        found[f"socket:[{words[9]}]"] = what
    return found


def _port(address: str) -> int:
    return int(address.rpartition(":")[2], 16)
