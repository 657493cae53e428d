"""Joins a cluster: a rank that torchrun starts on another machine serves the ComfyUI on the head.

`torchrun … -m parallel_backend.rank --join HEAD:PORT --secret-file F`. The first process of a machine holds the
connection to the head. All processes of the machine, including the first, reach it over a Unix socket, which replaces a
local rank's link to ComfyUI. When a group ends, its processes exit, and torchrun starts new ones, which join again.
"""

from __future__ import annotations

import argparse
import functools
import os
import re
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ...cluster.endpoint import MACHINE, PORT, check_name, read_endpoint
from ...errors import PlatformError, RequestError
from ...options import DEVICE_QUEUES
from ...wire.cache_folder import lock_folder
from ...wire.parent_death import die_with_parent

if TYPE_CHECKING:
    from ...wire.transport import Link
    from .joined_worker import MachineFiles

_SIZE = 4096  # most bytes of a message between processes of a machine


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="torchrun … -m parallel_backend.rank",
        description="Lends this machine's devices to a ComfyUI elsewhere.",
    )
    parser.add_argument("--join", required=True, metavar="HEAD[:PORT]", help="the computer that runs ComfyUI")
    parser.add_argument(
        "--secret-file", required=True, type=Path, help="what `cluster init` made for the machines"
    )
    parser.add_argument(
        "--models", action="append", default=[], type=Path, help="a folder with the models; may be repeated"
    )
    parser.add_argument(
        "--comfyui", type=Path, help="ComfyUI's folder here, of the same version as the head's"
    )
    parser.add_argument(
        "--machine", default="", help="this machine's name in ComfyUI; its host name if not given"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), help="GPUs where there are any, if not given")
    return parser.parse_args(argv)


def join(argv: list[str]) -> tuple[Link, int, int, MachineFiles]:
    """Waits until the head takes this process into a group. Returns (link, epoch, descriptor of the heartbeat page,
    this machine's files). Raises ParallelError if it cannot join, and ends the process if the first one has ended."""
    arguments = parse(argv)
    parent = os.getppid()
    die_with_parent(parent)
    os.environ.setdefault(
        "HF_HUB_OFFLINE", "1"
    )  # weights come from the model folders, never from the network
    os.environ.update(DEVICE_QUEUES)  # must be set before CUDA starts
    if "LOCAL_RANK" not in os.environ:
        raise PlatformError(
            "A process joins a cluster when torchrun starts it; docs/deployment.md has the command."
        )
    local, count = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    machine = arguments.machine or re.sub(r"[^a-z0-9_.-]+", "-", socket.gethostname().lower()).strip("-.")
    check_name("machine", machine)
    address = _address(parent)
    if local == 0:
        _begin_relay(arguments, machine, count, address)
    return _wait_for_start(arguments, machine, local, address)


def _begin_relay(arguments: argparse.Namespace, machine: str, count: int, address: Path) -> None:
    from .machine_relay import MachineRelay

    endpoint = read_endpoint(arguments.secret_file, MACHINE)
    host, _, port = (
        arguments.join.rpartition(":") if ":" in arguments.join else (arguments.join, "", str(PORT))
    )
    if not port.isdecimal():
        raise RequestError(
            f"--join {arguments.join!r}: write the head's address and port, such as 10.0.0.1:{PORT}."
        )
    address.unlink(missing_ok=True)  # left by an earlier torchrun with the same process id
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(address))
    listener.listen(count)
    relay = MachineRelay(endpoint, (host.strip("[]"), int(port)), machine, listener, count)
    threading.Thread(target=relay.run, name="cluster-relay", daemon=True).start()


def _wait_for_start(
    arguments: argparse.Namespace, machine: str, local: int, address: Path
) -> tuple[Link, int, int, MachineFiles]:
    import torch

    from ...cluster.handshake import pack, unpack
    from ...wire import deadlines
    from ...wire.transport import Link
    from .joined_worker import MachineFiles
    from .machine_relay import LocalHello, LocalStart

    _hosted_store()
    kind = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    memory = torch.cuda.get_device_properties(local).total_memory if kind == "cuda" else 0
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    until = time.monotonic() + deadlines.START
    while True:
        try:
            sock.connect(str(address))
            break
        except (FileNotFoundError, ConnectionRefusedError):
            if time.monotonic() > until:
                raise PlatformError(
                    f"The first process of this machine does not listen on {address}."
                ) from None
            time.sleep(deadlines.POLL)
    sock.send(pack(LocalHello(local, f"{kind}:{local}", memory)))
    data, descriptors, _, _ = socket.recv_fds(sock, _SIZE, 1)
    if not data:
        os._exit(1)  # the first process ended
    start = unpack(data, LocalStart)
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if start.interface:
            os.environ.setdefault(variable, start.interface)
    return (
        Link(sock),
        start.epoch,
        descriptors[0],
        MachineFiles(machine, tuple(arguments.models), arguments.comfyui),
    )


@functools.cache  # the store is served as long as this process lives
def _hosted_store() -> object:
    """Serves, in torchrun's first process, the store at which the ranks of all machines meet, for any group. Returns
    None in other processes, and if torchrun's agent serves the store."""
    import torch.distributed as dist

    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or os.environ.get("RANK") != "0":
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(host, port, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]


def _address(parent: int) -> Path:
    """Returns the path of the socket at which the processes of one torchrun meet, in a folder of this user."""
    try:
        return lock_folder() / f"join-{parent}"
    except PermissionError as error:
        raise PlatformError(f"{error.strerror}: remove {error.filename}.") from None
