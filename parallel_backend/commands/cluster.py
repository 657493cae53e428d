"""`python -m parallel_backend cluster`: makes the secret files with which other machines lend their devices."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..cluster.endpoint import (
    HEAD,
    MACHINE,
    PORT,
    Endpoint,
    check_name,
    head_file,
    known_clusters,
    machine_file,
    read_endpoint,
    write_endpoint,
)
from ..cluster.tls import make_certificate
from ..errors import RequestError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True)
    init = actions.add_parser("init", help="make a cluster, or new certificates for one (--again)")
    init.add_argument("name", help="as in devices cluster:NAME")
    init.add_argument(
        "--address", default="", help="on which ComfyUI's computer listens; all of its own if not given"
    )
    init.add_argument("--port", type=int, default=PORT)
    init.add_argument("--again", action="store_true", help="replace certificates that machines have already")
    actions.add_parser("list", help="the clusters that this computer knows")


def run(args: argparse.Namespace) -> int:
    if args.action == "list":
        for name in known_clusters():
            endpoint = read_endpoint(head_file(name), HEAD)
            sys.stdout.write(f"{name}: port {endpoint.port}, {head_file(name)}\n")
        return 0
    name = check_name("cluster", args.name)
    if not 0 < args.port < 65536:
        raise RequestError(f"--port {args.port}: ports are 1 to 65535.")
    if head_file(name).exists() and not args.again:
        raise RequestError(
            f"The cluster {name} exists ({head_file(name)}). With --again it gets new certificates, and each machine "
            f"needs the new secret file."
        )
    make(name, args.address, args.port)
    sys.stdout.write(_instructions(name, args))
    return 0


def _instructions(name: str, args: argparse.Namespace) -> str:
    secret = machine_file(name)
    return f"""ComfyUI's half stays here: {head_file(name)}
The machines' half goes to each machine by a safe way (scp), and stays secret there: {secret}
On each machine, in this pack's folder, with its own address for ADDRESS, one machine's for FIRST on all of them, and
is_host=1 on that one alone:
  export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
  torchrun --nnodes N --nproc-per-node gpu --max-restarts 1000000 --local-addr ADDRESS \\
    --rdzv-backend c10d --rdzv-endpoint FIRST:29400 --rdzv-id {name} --rdzv-conf is_host=0,last_call_timeout=5 \\
    -m parallel_backend.rank --join {args.address or "HEAD"}:{args.port} --secret-file {secret.name} \\
    --models MODELS --comfyui COMFYUI
Then restart ComfyUI, which listens from now on; in the graph: devices cluster:{name} in Strategy Selector.
"""


def make(name: str, address: str, port: int) -> tuple[Path, Path]:
    """Writes both secret files of a cluster and returns their paths: (the head's, the machines')."""
    head_key, head = make_certificate(f"{name} head")
    machine_key, machine = make_certificate(f"{name} machines")
    write_endpoint(head_file(name), Endpoint(name, HEAD, address, port, head_key, head, machine))
    write_endpoint(machine_file(name), Endpoint(name, MACHINE, address, port, machine_key, machine, head))
    return head_file(name), machine_file(name)
