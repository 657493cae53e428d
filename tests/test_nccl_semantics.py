"""The tests' stand-in for NCCL behaves as torch documents NCCL, even for errors that gloo tolerates."""

import threading
from functools import partial

import pytest
import torch
import torch.distributed as dist

import nccl_device
from host_and_device import DEVICE
from nccl_device import NcclError
from nccl_semantics import NCCL_STREAMS
from ranks import RankError, run_ranks

SHORT = 1.0  # s after which an operation counts as hanging


def run(fn, *args, **how):
    return run_ranks(fn, 2, *args, **how)


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
    """Runs collectives. By all-to-all rank 0 sends [1, 2] rows to ranks 0 and 1, and rank 1 sends [3, 0]."""
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
    except (NcclError, ValueError) as error:
        return str(error)
    return ""


def _ended(world, act):
    """Returns the error of `act` once all ranks have ended it."""
    said = _error_of(act)
    dist.barrier(group=world.control)
    return said


def _alone(world):
    """Sends from rank 0 without a receive on rank 1. Gloo would take the message and go on."""
    nccl_device.PATIENCE = SHORT
    return _ended(world, lambda: None if world.rank else dist.isend(torch.zeros(1), 1))


def _both_send_first(world, batched):
    peer, sent, arriving = 1 - world.rank, torch.ones(1), torch.zeros(1)
    # The pair's communicator is made before the operations that must hang.
    (dist.isend if world.rank else dist.irecv)(arriving, peer).wait()
    if batched:
        operations = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, arriving, peer)]
        works = dist.batch_isend_irecv(operations)
    else:
        nccl_device.PATIENCE = SHORT
        works = [dist.isend(sent, peer), dist.irecv(arriving, peer)]
    said, *_ = [_error_of(work.wait) for work in works]
    dist.barrier(group=world.control)
    return said


def _another_collective(world):
    def act():
        tensor = torch.zeros(2)
        work = (
            dist.broadcast(tensor, 0, async_op=True) if world.rank else dist.all_reduce(tensor, async_op=True)
        )
        work.wait()  # the call itself raises no error

    return _ended(world, act)


def _written_too_early(world):
    def act():
        tensor, gathered = torch.zeros(1), [torch.zeros(1), torch.zeros(1)]
        work = dist.all_gather(gathered, tensor, async_op=True)
        tensor += 1
        work.wait()

    return _ended(world, act)


@pytest.mark.parametrize(
    ("act", "arguments", "words"),
    [
        (_alone, (), ["nobody else came", ""]),
        (_both_send_first, (False,), ["send to 1", "send to 0"]),
        (_both_send_first, (True,), ["", ""]),
        (_another_collective, (), ["came with all_reduce of 8 bytes of torch.float32, broadcast from 0"] * 2),
        (_written_too_early, (), ["written to before the wait"] * 2),
    ],
    ids=["a first send alone", "sends of a pair cross", "the same as a batch", "two collectives", "written"],
)
def test_what_gloo_forgives_is_an_error(act, arguments, words):
    for said, expected in zip(run(act, *arguments), words, strict=True):
        assert expected in said and bool(said) == bool(expected)


def _other_orders(world, patience):
    """Runs two sums in two groups, in another order on each rank."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    for group in groups:
        dist.all_reduce(torch.ones(1), group=group)
    nccl_device.PATIENCE = patience
    in_turn = groups if world.rank else groups[::-1]
    works = [dist.all_reduce(torch.ones(1), group=group, async_op=True) for group in in_turn]
    said = [_error_of(work.wait) for work in works]
    dist.barrier(group=world.control)
    return "".join(said)


def test_an_order_that_needs_kernels_beside_each_other_is_an_error():
    """Each sum waits for a peer whose device is busy with the other sum."""
    assert any("did not end" in said for said in run(_other_orders, SHORT))
    assert run(_other_orders, nccl_device.PATIENCE, backend=NCCL_STREAMS) == ["", ""]


def _sizes_differ(world):
    """Runs a sum, a send, a batch and an all-to-all with sizes that differ, each in a new group: an error ends it."""

    def sends(group):
        return (dist.recv if world.rank else dist.send)(torch.zeros(2 + world.rank), 1 - world.rank, group)

    def batch(group):
        sent, arriving, peer = torch.zeros(2 + world.rank), torch.zeros(2), 1 - world.rank
        operations = [
            dist.P2POp(dist.isend, sent, peer, group),
            dist.P2POp(dist.irecv, arriving, peer, group),
        ]
        return dist.batch_isend_irecv(operations)[0].wait()

    def exchange(group):
        return dist.all_to_all_single(torch.zeros(3), torch.zeros(2), [1, 2], [1, 1], group=group)

    nccl_device.PATIENCE = 6 * SHORT  # for the rank whose message is not received
    said = []
    for act in (
        lambda group: dist.all_reduce(torch.zeros(2 + world.rank), group=group),
        sends,
        batch,
        exchange,
    ):
        group = dist.new_group([0, 1])
        said.append(_error_of(lambda act=act, group=group: act(group)))
    return said


def test_sizes_that_differ_are_an_error():
    first, (sums, received, _, exchanged) = run(_sizes_differ)
    assert "came with all_reduce of 8 bytes of torch.float32, all_reduce of 12 bytes" in sums
    assert "12 bytes of torch.float32 are expected where 8 bytes" in received
    assert "8 bytes of torch.float32 are expected where 12 bytes" in first[2]
    assert "[4, 8] bytes are expected where [4, 4] are sent" in exchanged


def _refused(world):
    """Returns the errors of calls that a communicator refuses at once, so that no rank waits for them."""
    whole, thread_said = torch.zeros(4), []
    refused = (
        lambda: dist.all_reduce(torch.zeros(2, dtype=torch.int16)),
        lambda: dist.all_reduce(torch.zeros(2, 2).T),
        lambda: dist.all_to_all_single(whole, whole),
        lambda: dist.all_gather([whole[:2], whole[1:3]], torch.zeros(2)),
        lambda: dist.all_to_all_single(torch.zeros(2), whole, [1, 1], [3, 2]),
        lambda: dist.all_to_all_single(torch.zeros(3), torch.zeros(3)),
    )
    said = [_error_of(act) for act in refused]
    other = threading.Thread(
        target=lambda: thread_said.append(_error_of(lambda: dist.all_reduce(torch.zeros(2))))
    )
    dist.all_reduce(torch.zeros(2))
    other.start()
    other.join()
    # In place: the input lies where this rank's share arrives.
    dist.all_gather(list(whole.chunk(2)), whole[2 * world.rank :][:2])
    return [*said, *thread_said]


def test_what_nccl_does_not_take_is_an_error():
    words = (
        "NCCL has no torch.int16",
        "must be contiguous",
        "all_to_all: what arrives would lie where something else does",
        "all_gather: what arrives would lie where something else does",
        "[3, 2] is no split of 4 rows over 2 ranks",
        "3 rows do not divide by 2 ranks",
        "two threads of a rank begin operations",
    )
    for said in run(_refused):
        for found, expected in zip(said, words, strict=True):
            assert expected in found


def _on_the_host(world):
    there = torch.zeros(2, device=DEVICE)
    dist.all_reduce(there)
    return [_error_of(partial(dist.all_reduce, tensor)) for tensor in (there.cpu(), torch.zeros(2))]


def test_what_is_on_the_host_is_an_error():
    for said in run(_on_the_host, device=DEVICE):
        assert all("tensors must be on the device" in one for one in said) and len(said) == 2


def _never_waited(world):
    dist.all_reduce(torch.zeros(1), async_op=True)


def test_what_nobody_waits_for_is_an_error():
    with pytest.raises(RankError, match="nobody has waited for all_reduce of 4 bytes"):
        run(_never_waited)
