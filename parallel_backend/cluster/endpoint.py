"""The two secret files of a cluster, one for the head and one for the machines, and the folder of the heads' files.

Each file holds the key and certificate of one end, and the other end's certificate: that end accepts no other one.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import DeviceError, PlatformError, RequestError, TransportError
from ..wire.strict_json import from_json, parse, to_json

VARIABLE = "PARALLEL_SAMPLING_CLUSTERS"  # an environment variable: the folder with the heads' files
PORT = 29600
HEAD, MACHINE = "head", "machine"
NAME = re.compile(
    r"[a-z0-9][a-z0-9_.-]{0,62}"
)  # the name of a cluster or machine; lower case, as in device names
_MOST_BYTES = 64 * 1024


@dataclass(frozen=True)
class Endpoint:
    """One end of a cluster's connections. `role`: HEAD or MACHINE; `address`, `port`: where the head listens, address
    "" for all interfaces; `key`, `certificate`, `peer` (the other end's certificate): PEM."""

    cluster: str
    role: str
    address: str
    port: int
    key: str
    certificate: str
    peer: str


def clusters_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Returns the folder of the heads' files: VARIABLE, else a folder in $XDG_CONFIG_HOME, else one in ~/.config."""
    if chosen := environ.get(VARIABLE):
        return Path(chosen)
    base = environ.get("XDG_CONFIG_HOME", "")
    config = Path(base) if Path(base).is_absolute() else Path(environ.get("HOME", "/"), ".config")
    return config / "comfyui-parallel-sampling" / "clusters"


def head_file(cluster: str) -> Path:
    return clusters_folder() / f"{cluster}.{HEAD}.json"


def machine_file(cluster: str) -> Path:
    return clusters_folder() / f"{cluster}.{MACHINE}.json"


def known_clusters() -> tuple[str, ...]:
    """Returns the names of the clusters whose head is this computer."""
    suffix = f".{HEAD}.json"
    return tuple(sorted(file.name.removesuffix(suffix) for file in clusters_folder().glob(f"*{suffix}")))


def find_head(cluster: str) -> Endpoint:
    """Reads the head's end of a cluster. Raises DeviceError if the cluster is unknown or its file cannot be read."""
    if not NAME.fullmatch(cluster):
        raise DeviceError(
            f"devices 'cluster:{cluster[:80]}': {cluster[:80]!r} is no name of a cluster; write the one that it was "
            f"made with, such as cluster:lab.",
            nearest=(("devices", "all"),),
        )
    if cluster not in known_clusters():
        known = ", ".join(known_clusters()) or "none"
        raise DeviceError(
            f"devices 'cluster:{cluster}': this computer knows no cluster of that name (known: {known}). Make it with "
            f"`python -m parallel_backend cluster init {cluster}`; docs/deployment.md has all steps.",
            nearest=(("devices", "all"),),
        )
    try:
        return read_endpoint(head_file(cluster), HEAD)
    except PlatformError as error:
        raise DeviceError(f"devices 'cluster:{cluster}': {error}", nearest=(("devices", "all"),)) from None


def read_endpoint(path: Path, role: str) -> Endpoint:
    """Reads a secret file. Raises PlatformError if it cannot be read, others can read it, or it is not for `role`."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(_MOST_BYTES).decode()
    except (OSError, ValueError) as error:
        raise PlatformError(f"The secret file {path} cannot be read: {error}.") from None
    if mode & 0o077:
        raise PlatformError(f"Others can read the secret file {path}; run: chmod 600 {path}")
    try:
        endpoint = from_json(parse(text), Endpoint, "secret")
    except (ValueError, RecursionError, TransportError):
        raise PlatformError(
            f"{path} is no secret file of a cluster; `python -m parallel_backend cluster init` makes one."
        ) from None
    if endpoint.role != role:
        raise PlatformError(
            f"{path} is for a {endpoint.role}, and a {role} wants its own: NAME.head.json stays on the computer that "
            f"runs ComfyUI, NAME.machine.json goes to the machines."
        )
    return endpoint


def write_endpoint(path: Path, endpoint: Endpoint) -> None:
    """Writes a secret file that only this user can read. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # an existing file would keep its mode
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(to_json(endpoint), file, indent=1)


def check_name(what: str, name: str) -> str:
    """Returns the `name` of a cluster or machine. Raises RequestError if a device's name cannot contain it."""
    if not NAME.fullmatch(name):
        raise RequestError(
            f"{what} {name[:80]!r}: a name is made of a-z, 0-9, '-', '_' and '.', at most 63 of them, and begins "
            f"with a letter or a number."
        )
    return name
