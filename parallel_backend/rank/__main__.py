"""The loop of one rank: `python -m parallel_backend.rank --fd N --parent PID`, started by the supervisor."""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from ..wire.parent_death import die_with_parent

if TYPE_CHECKING:  # they take a second to import, so they are imported later
    from ..wire.payloads import Tensors
    from ..wire.protocol import Done, Envelope, Failed, Message, Setup
    from ..wire.transport import Link
    from .work.worker import RankWorker

    MakeWorker = Callable[[Setup], RankWorker]


_BEFORE_ANOTHER = 5.0  # s that a process which cannot run waits before it exits and torchrun starts another


def main(make_worker: MakeWorker | None = None) -> None:
    """Greets the parent, joins the group and serves requests until the link ends.

    `make_worker(setup)` returns the object that does the work; the default is RankWorker, tests pass their own.
    """
    faulthandler.enable()  # a rank that crashes shows where it was
    faulthandler.register(signal.SIGUSR1, all_threads=False)  # so does a hanging one when the supervisor asks
    if any(word.startswith("--join") for word in sys.argv[1:]):
        _serve_elsewhere()
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True, help="the inherited control link")
    parser.add_argument("--parent", type=int, required=True, help="process id of the parent")
    parser.add_argument(
        "--epoch", type=int, required=True, help="which start of the group this process belongs to"
    )
    parser.add_argument("--heartbeat", type=int, required=True, help="the inherited page of heartbeats")
    arguments = parser.parse_args()
    die_with_parent(arguments.parent)
    signal.signal(
        signal.SIGCHLD, signal.SIG_DFL
    )  # where ComfyUI ignores it, a compiler's exit code would be lost

    # Imported after die_with_parent: the parent may also die while torch is imported, which takes a second.
    from ..wire.transport import Link, LinkClosed

    link = Link.from_descriptor(arguments.fd)
    os.set_inheritable(arguments.fd, False)
    try:
        worker = _join(link, arguments.epoch, make_worker, arguments.heartbeat)
        serve(link, arguments.epoch, worker)
    except LinkClosed:
        _exit(0)
    except BaseException:
        traceback.print_exc()
        _exit(1)


def _serve_elsewhere() -> NoReturn:
    """Serves a ComfyUI on another computer. Always exits with status 1, so that torchrun starts another rank in place
    of this one."""
    from functools import partial

    from ..errors import ParallelError
    from .joined.join import join

    try:
        link, epoch, page, files = join(sys.argv[1:])
    except BaseException as error:
        known = isinstance(error, ParallelError)
        sys.stderr.write(f"parallel sampling: {error}\n" if known else traceback.format_exc())
        sys.stderr.flush()
        time.sleep(_BEFORE_ANOTHER)
        _exit(1)
    from ..wire.transport import LinkClosed
    from .joined.joined_worker import JoinedWorker

    try:
        with suppress(LinkClosed):
            serve(link, epoch, _join(link, epoch, partial(JoinedWorker, files=files), page))
    except BaseException:
        traceback.print_exc()
    _exit(1)


def _exit(code: int) -> NoReturn:
    """Ends this process at once: a normal exit would wait for collectives that have lost their peers."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _join(link: Link, epoch: int, make_worker: MakeWorker | None, page: int) -> RankWorker:
    """Does the handshake: Hello, Setup, process group, Done. Reports a failure before this rank ends."""
    from ..cluster.handshake import versions
    from ..options import FAULT
    from ..wire.heartbeat import heartbeat
    from ..wire.protocol import NO_REQUEST, Done, Envelope, Hello, Setup
    from .outcome.errors import failure

    def answer(message: Message) -> None:
        link.send(Envelope(epoch, NO_REQUEST, message), timeout=1.0)

    answer(Hello(*versions()[1:]))
    setup = _receive(link, epoch)[0].message
    if not isinstance(setup, Setup):
        raise RuntimeError(f"expected Setup, received {type(setup).__name__}")
    heartbeat.share(page, setup.rank)
    if faults := os.environ.get(FAULT):
        module, _, fault = faults.partition(" ")
        importlib.import_module(module).arm(fault, setup.rank, heartbeat)
    try:
        heartbeat.point("start")
        if make_worker is None:
            from .work.worker import RankWorker

            make_worker = RankWorker
        worker = make_worker(setup)
    except Exception as error:
        answer(failure(error, setup.rank, setup.devices[setup.rank]))
        raise
    answer(Done())
    return worker


def _receive(link: Link, epoch: int) -> tuple[Envelope, tuple[int, ...]]:
    """Returns the next (envelope, descriptors). Raises TransportError for a message of another epoch, which cannot be
    answered: that ends the rank."""
    from ..errors import TransportError
    from ..wire.transport import close_all

    received = link.receive()
    assert received is not None, "it waits without a limit"
    envelope, descriptors = received
    if envelope.epoch != epoch:
        close_all(descriptors)
        raise TransportError(f"a message of epoch {envelope.epoch} came in epoch {epoch}")
    return envelope, descriptors


def serve(link: Link, epoch: int, worker: RankWorker) -> NoReturn:
    """Answers each request with exactly one terminal message. Ends by raising LinkClosed."""
    while True:
        _serve_one(link, epoch, worker)


def _serve_one(link: Link, epoch: int, worker: RankWorker) -> None:
    from ..wire.deadlines import SEND
    from ..wire.heartbeat import heartbeat
    from ..wire.protocol import Cancel, Envelope
    from ..wire.transport import close_all, pack_tensors
    from .work.held_models import release_cache

    heartbeat.point("idle")
    envelope, descriptors = _receive(link, epoch)
    if isinstance(envelope.message, Cancel):
        return  # it came after its request had ended
    answer, result = _answer(link, envelope, descriptors, worker)
    payload = () if result is None else (pack_tensors(result),)
    result = None
    try:
        # Before ComfyUI goes on: it may need the memory for a VAE of its own.
        release_cache(worker.world.device)
        link.send(Envelope(epoch, envelope.request, answer), payload, SEND)
    finally:
        close_all(payload)


def _answer(
    link: Link, envelope: Envelope, descriptors: tuple[int, ...], worker: RankWorker
) -> tuple[Done | Failed, Tensors | None]:
    """Serves one request; returns (terminal message, result tensors or None)."""
    from ..wire.heartbeat import heartbeat
    from ..wire.transport import LinkClosed, close_all, unpack_tensors
    from .outcome.errors import failure
    from .outcome.progress import RequestLink

    world = worker.world
    heartbeat.begin()
    try:
        try:
            tensors = unpack_tensors(descriptors[0]) if descriptors else {}
        finally:
            close_all(descriptors)
        request = RequestLink(link, envelope.epoch, envelope.request, world.rank)
        return worker.answer(envelope.message, tensors, request)
    except LinkClosed:
        raise
    except Exception as error:
        return failure(error, world.rank, str(world.device)), None


if __name__ == "__main__":
    main()
