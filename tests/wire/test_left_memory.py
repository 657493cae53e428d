import mmap

import torch

from parallel_backend.wire.left_memory import LeftMemory

LARGE = (1 << 18) + 5  # float32


def test_what_nobody_holds_any_more_is_used_again_and_what_somebody_holds_is_not():
    memory = LeftMemory()
    first = memory.copy(torch.full((LARGE,), 1.0))
    part = first[3:7]  # a view of it is enough
    place = first.data_ptr()
    del first
    second = memory.copy(torch.full((LARGE,), 2.0))
    assert second.data_ptr() != place and part.tolist() == [1.0] * 4
    del part
    third = memory.copy(torch.full((LARGE,), 3.0))
    assert third.data_ptr() == place
    assert second.unique().tolist() == [2.0] and third.unique().tolist() == [3.0]


def test_a_copy_is_the_callers_own():
    memory = LeftMemory()
    with torch.inference_mode():
        answer = torch.randn(2, 3, LARGE, dtype=torch.float64).transpose(0, 2).to(torch.bfloat16)
        copy = memory.copy(answer)
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
    memory = LeftMemory()
    for expected in (6, 8):  # of the second six, four lie where others did
        held = [memory.copy(torch.full((LARGE,), float(n))) for n in range(6)]
        assert [copy[0].item() for copy in held] == list(range(6)) and len(made) == expected
        del held
    lent = memory.copy(torch.full((LARGE,), 7.0))
    memory.release()
    memory.copy(torch.zeros(LARGE))
    assert len(made) == 9 and lent[0].item() == 7.0


def test_small_tensors_take_what_malloc_has():
    memory = LeftMemory()
    assert torch.equal(memory.copy(torch.arange(4)), torch.arange(4))
    assert torch.equal(memory.copy(torch.empty(0, 3)), torch.empty(0, 3))
