"""The tests' stand-in for NCCL does what torch documents of it, where gloo forgives."""

import pytest
import torch
import torch.distributed as dist

import nccl_semantics
from nccl_semantics import NCCL_SEMANTICS, NcclError
from ranks import run_ranks

SHORT = 2.0  # s after which what must hang is known to


def run(fn, *args):
    return run_ranks(fn, 2, *args, backend=NCCL_SEMANTICS)


def _reads_before_the_wait(world):
    peer = 1 - world.rank
    gathered = [torch.zeros(2), torch.zeros(2)]
    gather = dist.all_gather(gathered, torch.full((2,), float(world.rank)), async_op=True)
    early = torch.cat(gathered).isnan().all().item()
    gather.wait()
    received = torch.zeros(3, dtype=torch.int32)
    if world.rank:
        receive = dist.irecv(received, peer)
        early = early and (received == -1).all().item()
        receive.wait()
    else:
        dist.isend(torch.arange(3, dtype=torch.int32), peer).wait()
    return early, torch.cat(gathered), received


def test_nothing_is_there_before_the_wait_and_all_of_it_after():
    for early, gathered, _ in (found := run(_reads_before_the_wait)):
        assert early and gathered.tolist() == [0, 0, 1, 1]
    assert found[1][2].tolist() == [0, 1, 2]


def _uneven(world):
    """Rank 0 sends one row to itself and two to rank 1, which sends three and none."""
    send, sizes = (torch.arange(3.0), [1, 2]) if world.rank == 0 else (torch.arange(3.0) + 10, [3, 0])
    receive_sizes = [1, 3] if world.rank == 0 else [2, 0]
    received = torch.empty(sum(receive_sizes))
    dist.all_to_all_single(received, send, receive_sizes, sizes)
    total, shared = torch.tensor([world.rank + 1.0]), torch.tensor([float(world.rank)])
    dist.all_reduce(total)
    dist.broadcast(shared, 1)
    return received, total, shared


def test_collectives_give_what_they_should():
    first, second = run(_uneven)
    assert first[0].tolist() == [0, 10, 11, 12] and second[0].tolist() == [1, 2]
    for _, total, shared in (first, second):
        assert (total.item(), shared.item()) == (3, 1)


def _send_and_look(world):
    tensor = torch.zeros(1)
    if world.rank == 0:
        first = dist.isend(tensor, 1)
        first.wait()
        second = dist.isend(tensor, 1)
        dist.barrier(group=world.control)  # rank 1 asks only after it
        early = second.is_completed()
        dist.barrier(group=world.control)
        second.wait()
        return early
    dist.recv(tensor, 0)
    dist.barrier(group=world.control)
    dist.barrier(group=world.control)
    dist.recv(tensor, 0)
    return False


def test_a_send_ends_when_it_is_received():
    assert run(_send_and_look) == [False, False]


def _error_of(act):
    try:
        act()
    except NcclError as error:
        return str(error)
    return ""


def _alone(world):
    """Gloo would take the message and go on."""
    nccl_semantics.PATIENCE = SHORT
    said = _error_of(lambda: dist.isend(torch.zeros(1), 1)) if world.rank == 0 else ""
    dist.barrier(group=world.control)
    return said


def _both_send_first(world, batched):
    def act():
        peer, sent, arriving = 1 - world.rank, torch.ones(1), torch.zeros(1)
        # The pair stands before what must hang begins.
        (dist.isend if world.rank else dist.irecv)(arriving, peer).wait()
        if not batched:
            nccl_semantics.PATIENCE = SHORT
        if batched:
            operations = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, arriving, peer)]
            works = dist.batch_isend_irecv(operations)
        else:
            works = [dist.isend(sent, peer), dist.irecv(arriving, peer)]
        for work in works:
            work.wait()

    said = _error_of(act)
    dist.barrier(group=world.control)
    return said


def _another_collective(world):
    def act():
        tensor = torch.zeros(2)
        work = (
            dist.broadcast(tensor, 0, async_op=True) if world.rank else dist.all_reduce(tensor, async_op=True)
        )
        work.wait()  # at the call itself nothing shows

    said = _error_of(act)
    dist.barrier(group=world.control)
    return said


def _written_too_early(world):
    def act():
        tensor, gathered = torch.zeros(1), [torch.zeros(1), torch.zeros(1)]
        work = dist.all_gather(gathered, tensor, async_op=True)
        tensor += 1
        work.wait()

    said = _error_of(act)
    dist.barrier(group=world.control)
    return said


@pytest.mark.parametrize(
    ("act", "arguments", "words"),
    [
        (_alone, (), ["nobody else came", ""]),
        (_both_send_first, (False,), ["send to 1", "send to 0"]),
        (_both_send_first, (True,), ["", ""]),
        (_another_collective, (), ["came with all_reduce, broadcast from 0"] * 2),
        (_written_too_early, (), ["written to before the wait"] * 2),
    ],
    ids=["a first send alone", "sends of a pair cross", "the same as a batch", "two collectives", "written"],
)
def test_what_gloo_forgives_is_an_error(act, arguments, words):
    for said, expected in zip(run(act, *arguments), words, strict=True):
        assert expected in said and bool(said) == bool(expected)
