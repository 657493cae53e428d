"""`python -m tests.support.forked_torchrun NAMESPACE …`: torchrun as a fork of the fork server.

The ranks that it starts are forks of a server that is a fork of it. NAMESPACE: file of the network namespace to run in,
or an empty word. Everything else goes to torchrun itself.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from parallel_backend.sidecar.group import supervisor
from tests.support.forked_ranks import ForkedProcess, ForkedSubprocess

_CLONE_NEWNET = 0x40000000  # <linux/sched.h>


def _main() -> None:
    namespace, *arguments = sys.argv[1:]
    if namespace:
        with Path(namespace).open() as file:
            assert ctypes.CDLL(None).setns(file.fileno(), _CLONE_NEWNET) == 0
    forks = ForkedSubprocess(supervisor)
    forks.fork_server_here()

    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    def start(args: Sequence[str], env: Mapping[str, str], **options) -> ForkedProcess:
        return forks.fork(args, dict(env), sys.stdout.fileno())

    subprocess_handler.Popen = start
    # It looks at all imported modules for a line of a log, several times per second; here these are thousands.
    dynamic_rendezvous.get_method_name = lambda depth=2: ""
    run.main(arguments)


if __name__ == "__main__":
    _main()
