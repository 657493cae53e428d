"""Cluster machines for tests: the head's secret files, a machine that is only a connection, and real torchruns."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from parallel_backend.cluster import endpoint as endpoints
from parallel_backend.cluster.channel import Kind
from parallel_backend.cluster.handshake import Join, pack, receive_first, send_first, versions
from parallel_backend.cluster.tls import make_context, secure
from parallel_backend.commands.cluster import make
from parallel_backend.sidecar.cluster import head as clusters
from parallel_backend.sidecar.group import supervisor
from parallel_backend.sidecar.group.supervisor import PACK_ROOT


def make_cluster(folder: Path, address: str = "127.0.0.1", port: int = 0) -> Path:
    """Makes the cluster `lab` and returns its machines' secret file. endpoints.VARIABLE must name `folder`."""
    assert Path(os.environ[endpoints.VARIABLE]) == folder
    return make("lab", address, port)[1]


def connect(head: clusters.ClusterHead, source: str = "127.0.0.1") -> socket.socket:
    """Opens a plain connection to the head from the loopback address `source`."""
    return socket.create_connection(("127.0.0.1", head.port), 20, (source, 0))


class BareMachine:
    """A machine without ranks. `welcomed`: True if the head accepted it; `words`: the reason if not."""

    def __init__(
        self, head: clusters.ClusterHead, secret: Path, *, source: str = "127.0.0.1", **join
    ) -> None:
        endpoint = endpoints.read_endpoint(secret, endpoints.MACHINE)
        self.socket = secure(connect(head, source), endpoint, make_context(endpoint), 20)
        fields = dict(zip(("protocol", "python", "torch"), versions(), strict=True))
        fields |= {"machine": "bare", "devices": ("cpu:0",), "memory": (0,)} | join
        send_first(self.socket, Kind.JOIN, pack(Join(**fields)))
        kind, text = receive_first(self.socket, 20)
        self.welcomed, self.words = kind is Kind.WELCOME, text.decode()

    def is_ended(self) -> bool:
        """Waits until the head closes the connection and returns True. Raises TimeoutError after 20 s of silence."""
        self.socket.settimeout(20)
        try:
            while self.socket.recv(65536):
                pass
        except ConnectionError:
            pass
        return True

    def close(self) -> None:
        self.socket.close()


class Torchrun:
    """torchrun on one machine. `stop` ends it abruptly, like a host that is switched off."""

    def __init__(
        self,
        machine: str,
        secret: Path,
        head: str,
        meeting: str,
        *,
        models: Path,
        local: str = "127.0.0.1",
        nodes: str = "2",
        ranks: int = 1,
        log: Path,
        settings: str = "",
        comfyui: Path | None = None,
    ) -> None:
        command = ["--nnodes", nodes]
        command += ["--nproc-per-node", str(ranks), "--max-restarts", "1000", "--rdzv-backend", "c10d"]
        command += ["--rdzv-endpoint", meeting, "--rdzv-id", "lab", "--local-addr", local]
        command += ["--rdzv-conf", settings] if settings else []
        command += ["--log-dir", str(log.parent)]  # else torchrun leaves a folder in the temporary one
        command += ["-m", "parallel_backend.rank", "--join", head, "--secret-file", str(secret)]
        command += ["--models", str(models), "--machine", machine, "--device", "cpu"]
        command += ["--comfyui", str(comfyui)] if comfyui else []
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        with log.open("ab") as output:
            self.process = self._start(command, environment, output)

    def _start(self, arguments, environment, output):
        return subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *arguments],
            cwd=PACK_ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )

    def ranks(self) -> list[int]:
        """Returns the process ids of its ranks."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(pid) for pid in children if b"parallel_backend.rank" in _command_line(pid)]

    def stop(self) -> None:
        """Kills torchrun; its ranks die with it."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()


class ForkedTorchrun(Torchrun):
    """torchrun and its ranks as forks of the fork server. `namespace`: file of the network namespace to run in."""

    def __init__(self, *names: str | Path, namespace: str = "", **options) -> None:
        self._namespace = namespace
        super().__init__(*names, **options)

    def _start(self, arguments, environment, output):
        command = [sys.executable, "-m", "tests.support.forked_torchrun", self._namespace, *arguments]
        return supervisor.subprocess.fork(command, environment, output.fileno())


def _command_line(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has just ended
        return b""
