"""Packing of a module's answer of several tensors into one tensor, and back, for any number of rows."""

import torch

from parallel_backend.engine.stages.owners import pack, unpack


def test_what_is_packed_is_unpacked_as_it_was():
    video, sound = torch.randn(2, 3, 4, 5), torch.randn(2, 7)
    for answer in ([video, sound], (sound, video)):
        packed = pack(answer)
        assert packed.shape == (2, 1, 67) and torch.equal(packed[0, 0, :7], answer[0][0].flatten()[:7])
        empty = type(answer)(one[:0] for one in answer)  # gives the form, not the number of rows
        found = unpack(packed, empty)
        assert type(found) is type(answer)
        assert all(map(torch.equal, found, answer))
    assert pack(video) is video and unpack(video, video[:0]) is video


def test_what_are_no_tensors_of_the_same_rows_is_not_packed():
    video = torch.randn(2, 3)
    assert [pack(other) for other in (None, [], [video, None], [video, video[:1]], torch.Size((2,)))] == [
        None
    ] * 5
