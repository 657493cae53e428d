"""The parent process of tests' ranks: it imports the modules of a rank once, and each rank is a fork of it.

`python -m tests.support.fork_server FD PADDING`, started by forked_ranks.py. It runs no operator, starts no thread and
touches no accelerator, and so can be forked. An order has the command, environment and descriptors with which a new
process would have been started; the answer is the rank's process id.

A rank is forked twice and its first parent ends at once. The kernel then gives it to the test's process, which has made
itself the subreaper of its descendants. There it is a child like any other: it can be waited for and dies with it.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import importlib
import json
import os
import pkgutil
import resource
import runpy
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

# The packages below parallel_backend/ that a rank's process uses.
ROOMS = ("wire", "models", "engine", "sampling", "rank")
LARGEST_ORDER = 128 * 1024  # bytes
MOST_DESCRIPTORS = 8
_FIRST_SPARE = 512  # no command names a descriptor from this number on
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


def main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    control = socket.socket(fileno=int(sys.argv[1]))
    _prepare()
    control.send(b"ready")
    serve(control)


def serve(control: socket.socket) -> None:
    """Forks a rank for each order, until the other end of `control` is closed."""
    while True:
        data, descriptors, *_ = socket.recv_fds(control, LARGEST_ORDER, MOST_DESCRIPTORS)
        if not data:
            return
        control.send(str(_fork(control, json.loads(data), descriptors)).encode())
        for descriptor in descriptors:
            os.close(descriptor)


def _prepare() -> None:
    """Imports the modules of ranks. Raises RuntimeError if that started a thread or CUDA: neither can be forked."""
    for name in _modules():
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if (error.name or "parallel_backend").startswith("parallel_backend"):
                raise  # other libraries may be missing: ranks that need them report it
    import torch

    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads != 1 or torch.cuda.is_initialized():
        raise RuntimeError(f"{threads} threads, CUDA initialised: {torch.cuda.is_initialized()}")
    gc.collect()
    gc.freeze()  # a garbage collection in a rank would write to every page of the imports, and so copy it


def _modules() -> Iterator[str]:
    """Yields the names of the modules in ROOMS, except those that `python -m` runs."""
    yield "tests.support.scripted"
    for room in ROOMS:
        path = Path("parallel_backend", room)
        for module in pkgutil.walk_packages([str(path)], f"parallel_backend.{room}."):
            if not module.name.endswith(".__main__"):
                yield module.name


def _fork(control: socket.socket, order: dict, descriptors: list[int]) -> int:
    """Forks a rank, with its own session and the test's process as its parent. Returns its process id."""
    reader, writer = os.pipe()
    first = os.fork()
    if first == 0:
        first = os.getpid()
        if os.fork():
            os._exit(0)
        code = 1
        try:
            os.close(reader)
            control.close()
            os.setsid()
            os.write(writer, str(os.getpid()).encode())
            os.close(writer)
            while os.getppid() == first:
                time.sleep(0.0005)
            code = _become(order, descriptors)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writer)
    os.waitpid(first, 0)
    with os.fdopen(reader) as answer:
        return int(answer.read())


def _become(order: dict, descriptors: list[int]) -> int:
    """Runs `python -m MODULE …` in this process as a fresh process would. Returns the exit code."""
    wanted = [1, *order["pass_fds"]]
    first = min(_FIRST_SPARE, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
    spare = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, first) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, number in zip(spare, wanted, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.dup2(1, 2)
    os.environ.clear()
    os.environ.update(order["env"])
    if order["env"]["OMP_NUM_THREADS"] != "1":  # the number with which this process started
        import torch

        torch.set_num_threads(int(order["env"]["OMP_NUM_THREADS"]))
    command = order["command"]
    show_as(command)
    module, *arguments = command[command.index("-m") + 1 :]
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as exit:
        if isinstance(exit.code, str):
            sys.stderr.write(exit.code + "\n")
        return exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def show_as(command: list[str]) -> None:
    """Makes ps and /proc show `command` in place of the fork server's command line, which is padded to be longer."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # arg_start and arg_end, proc(5)
    line = b"\0".join(word.encode() for word in command) + b"\0"
    assert len(line) <= end - start
    ctypes.memmove(start, line.ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    main()
