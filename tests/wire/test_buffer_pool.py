import mmap

import torch

from parallel_backend.wire.buffer_pool import BufferPool

LARGE = (1 << 18) + 5  # float32


def test_what_nobody_holds_any_more_is_used_again_and_what_somebody_holds_is_not():
    pool = BufferPool()
    first = pool.copy(torch.full((LARGE,), 1.0))
    part = first[3:7]  # a view of it is enough
    place = first.data_ptr()
    del first
    second = pool.copy(torch.full((LARGE,), 2.0))
    assert second.data_ptr() != place and part.tolist() == [1.0] * 4
    del part
    third = pool.copy(torch.full((LARGE,), 3.0))
    assert third.data_ptr() == place
    assert second.unique().tolist() == [2.0] and third.unique().tolist() == [3.0]


def test_a_copy_is_the_callers_own():
    pool = BufferPool()
    with torch.inference_mode():
        answer = torch.randn(2, 3, LARGE, dtype=torch.float64).transpose(0, 2).to(torch.bfloat16)
        copy = pool.copy(answer)
    assert torch.equal(copy, answer) and copy.dtype == torch.bfloat16
    copy.add_(1)  # outside of inference mode too
    assert not torch.equal(copy, answer)


def test_only_a_few_places_are_kept_and_none_after_release(monkeypatch):
    made = []

    def new_memory(*arguments):
        made.append(arguments)
        return real(*arguments)

    real = mmap.mmap
    monkeypatch.setattr(mmap, "mmap", new_memory)
    pool = BufferPool()
    for expected in (6, 8):  # of the second six, four lie where others did
        held = [pool.copy(torch.full((LARGE,), float(n))) for n in range(6)]
        assert [copy[0].item() for copy in held] == list(range(6)) and len(made) == expected
        del held
    lent = pool.copy(torch.full((LARGE,), 7.0))
    pool.release()
    pool.copy(torch.zeros(LARGE))
    assert len(made) == 9 and lent[0].item() == 7.0


def test_small_tensors_take_what_malloc_has():
    pool = BufferPool()
    assert torch.equal(pool.copy(torch.arange(4)), torch.arange(4))
    assert torch.equal(pool.copy(torch.empty(0, 3)), torch.empty(0, 3))
