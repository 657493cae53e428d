"""Arenas: tensors cross without new memory, what did not change is not written again, and no reader trusts a place."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest
import torch

from fake_cuda import FakeRuntime, OnGpu
from parallel_backend.errors import TransportError
from parallel_backend.wire import arena as arena_module
from parallel_backend.wire.arena import ArenaReader, ArenaWriter
from parallel_backend.wire.protocol import PlacedTensor
from parallel_backend.wire.transport import DTYPES, pack_tensors

fcntl = pytest.importorskip("fcntl")
pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture
def arena():
    writer, reader = ArenaWriter(), ArenaReader()
    yield writer, reader
    reader.release()
    writer.release()


def sent(arena, **tensors):
    """As they arrive; and how many bytes were written for them."""
    writer, reader = arena
    before = writer.bytes_written
    placed = writer.place(tensors)
    found = {name: tensor.clone() for name, tensor in reader.read(writer.descriptor, placed).items()}
    return found, writer.bytes_written - before


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_every_bit_of_every_dtype_arrives(arena, dtype):
    values = torch.arange(256, dtype=torch.uint8)
    tensor = values.bool() if dtype == torch.bool else values.view(dtype)
    found, _ = sent(arena, a=tensor, scalar=tensor[0], empty=tensor[:0], turned=tensor.reshape(8, -1).T)
    assert found["a"].dtype == dtype and found["scalar"].shape == () and found["empty"].shape == (0,)
    assert found["a"].view(torch.uint8).tolist() == tensor.view(torch.uint8).tolist()
    turned = tensor.reshape(8, -1).T.contiguous()
    assert found["turned"].view(torch.uint8).tolist() == turned.view(torch.uint8).tolist()


def test_one_memory_serves_all_calls_and_another_only_a_larger_one(arena):
    writer, _ = arena
    sent(arena, x=torch.zeros(1000))
    first = os.fstat(writer.descriptor).st_ino
    for number in range(5):
        found, written = sent(arena, x=torch.full((1000,), float(number)), t=torch.ones(number))
        assert found["x"].eq(number).all() and written == 4000 + 4 * number
    assert os.fstat(writer.descriptor).st_ino == first
    found, _ = sent(arena, x=torch.arange(500_000.0))
    assert torch.equal(found["x"], torch.arange(500_000.0))
    assert os.fstat(writer.descriptor).st_ino != first


def test_what_did_not_change_lies_there_already(arena):
    residuals = {f"residual.{i}": torch.randn(100) for i in range(3)}
    assert sent(arena, **residuals)[1] == 3 * 400
    assert sent(arena, **residuals)[1] == 0
    residuals["residual.1"].mul_(2)  # in place
    residuals["residual.2"] = torch.randn(100)
    found, written = sent(arena, **residuals)
    assert written == 2 * 400 and all(torch.equal(found[name], tensor) for name, tensor in residuals.items())


def test_a_tensor_is_written_again_where_its_writes_are_not_counted(arena):
    with torch.inference_mode():  # as ComfyUI runs
        tensor = torch.zeros(100)
        assert sent(arena, x=tensor)[1] == 400
        tensor.add_(1)
        found, written = sent(arena, x=tensor)
    assert found["x"].tolist() == [1.0] * 100 and written == 400
    assert sent(arena, x=torch.ones(100))[1] == 400  # the same memory, outside of that mode


def test_a_tensor_of_another_call_does_not_stand_for_one_that_was_overwritten(arena):
    one, other = torch.zeros(100), torch.ones(100)
    for tensor in (one, other, one, other):
        found, written = sent(arena, x=tensor)
        assert written == 400 and torch.equal(found["x"], tensor)


def test_calls_of_many_sizes_fit_into_memory_for_the_largest(arena):
    writer, _ = arena
    sent(arena, x=torch.zeros(2**20))
    inode = os.fstat(writer.descriptor).st_ino
    for size in range(2**18, 2**19, 2**14):
        found, _ = sent(arena, x=torch.full((size,), float(size)), y=torch.full((size + 1,), -1.0))
        assert found["x"].eq(size).all() and found["y"].eq(-1).all()
    assert os.fstat(writer.descriptor).st_ino == inode


def test_only_its_writer_can_write_and_nobody_can_shrink_it(arena):
    writer, reader = arena
    placed = writer.place({"x": torch.zeros(4)})
    size = os.fstat(writer.descriptor).st_size
    with pytest.raises(PermissionError):
        mmap.mmap(writer.descriptor, size)
    with pytest.raises(PermissionError):
        os.write(writer.descriptor, b"x")
    with pytest.raises(PermissionError):
        os.ftruncate(writer.descriptor, 0)
    assert reader.read(writer.descriptor, placed)["x"].tolist() == [0.0] * 4


def test_released_memory_is_made_again(arena):
    writer, reader = arena
    sent(arena, x=torch.ones(3))
    writer.release()
    writer.release()
    reader.release()
    assert writer.descriptor == -1
    assert sent(arena, x=torch.ones(3))[0]["x"].tolist() == [1.0] * 3


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"offset": 2**20}, "does not lie in its arena"),
        ({"offset": -64}, "does not lie in its arena"),
        ({"offset": 8}, "does not lie in its arena"),
        ({"shape": (2**62, 2**62)}, "does not lie in its arena"),
        ({"shape": (-1, -4)}, "does not lie in its arena"),
        ({"shape": (0, 2**70)}, "cannot be read"),
        ({"dtype": "U64"}, "has dtype 'U64'"),
        ({"name": "y"}, "two tensors of one name"),
    ],
)
def test_a_place_that_lies_is_refused(arena, change, reason):
    writer, reader = arena
    x, y = writer.place({"x": torch.ones(4), "y": torch.ones(4)})
    fields = {"name": x.name, "dtype": x.dtype, "shape": x.shape, "offset": x.offset, **change}
    with pytest.raises(TransportError, match=reason):
        reader.read(writer.descriptor, (PlacedTensor(**fields), y))
    assert reader.read(writer.descriptor, (x, y))["x"].tolist() == [1.0] * 4


def test_more_places_than_a_message_may_have_are_refused(arena):
    writer, reader = arena
    (x,) = writer.place({"x": torch.ones(1)})
    with pytest.raises(TransportError, match="places 257 tensors"):
        reader.read(writer.descriptor, (x,) * 257)


def test_memory_that_could_shrink_under_its_reader_is_refused(arena):
    _, reader = arena
    opened = [os.memfd_create("test", os.MFD_ALLOW_SEALING), *os.pipe(), pack_tensors({"x": torch.ones(1)})]
    try:
        os.ftruncate(opened[0], 4096)
        with pytest.raises(TransportError, match="not sealed"):
            reader.read(opened[0], ())
        with pytest.raises(TransportError, match="not a memfd"):
            reader.read(opened[1], ())
        empty = os.memfd_create("test", os.MFD_ALLOW_SEALING)
        opened.append(empty)
        fcntl.fcntl(empty, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        with pytest.raises(TransportError, match="has 0 bytes"):
            reader.read(empty, ())
    finally:
        for descriptor in opened:
            os.close(descriptor)


def test_a_reader_cannot_make_a_page_its_own(arena):
    """A driver that takes hold of pages as for writing does so where they are mapped for it, and this end would then
    read the same numbers with every call (ROCm, issue 6523)."""
    sent(arena, x=torch.ones(5000))
    own = str(
        os.fstat(arena[0].descriptor).st_ino
    )  # a test before this one may have left a mapping to be collected
    mappings = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    found = [
        rights for _, rights, _, _, inode, *name in mappings if inode == own and "arena" in "".join(name)
    ]
    assert sorted(found) == ["r--p", "rw-s"], "the reader's and the writer's"


def test_copies_of_gpus_are_waited_for_on_each_and_pages_are_locked_until_they_go(monkeypatch):
    """Else a rank might read what a GPU has yet to write, or the driver might hold on to memory that is another's."""
    runtime = FakeRuntime().put_in_place(monkeypatch)
    writer = ArenaWriter()
    call = {"x": OnGpu(torch.ones(5)), "y": OnGpu(torch.ones(3), "cuda:1"), "z": torch.ones(2)}
    for _ in range(2):
        writer.place(call)
    waits = ["synchronize cuda:0", "synchronize cuda:1"]
    assert (
        runtime.did[0] == "register"
        and sorted(runtime.did[1:3]) == waits
        and sorted(runtime.did[3:]) == waits
    )
    runtime.did.clear()
    writer.place({"x": OnGpu(torch.ones(2 << 20))})  # more than there is room for
    assert runtime.did == ["unregister", "register", "synchronize cuda:0"]
    writer.release()
    assert not runtime.locked


def test_where_pages_cannot_be_locked_that_is_tried_once(monkeypatch):
    runtime, tries = FakeRuntime().put_in_place(monkeypatch), []
    monkeypatch.setattr(arena_module, "_lock_pages", lambda memory, device: bool(tries.append(device)))
    writer = ArenaWriter()
    for _ in range(3):
        writer.place({"x": OnGpu(torch.ones(5)), "y": OnGpu(torch.ones(3))})
    writer.release()
    assert len(tries) == 1 and runtime.did == 3 * ["synchronize cuda:0"]
