"""Tensors that ranks keep: equal ones travel once, changing ones are never kept, and there is an end to the room."""

import torch

from parallel_backend.sidecar import tensor_cache
from parallel_backend.sidecar.tensor_cache import KnownTensors
from parallel_backend.wire.arguments import Kept

LARGE = (1, 64, 128)  # of float32: 32 KiB


def test_an_equal_tensor_is_known_under_the_same_key():
    known, prompt = KnownTensors(), torch.randn(LARGE)
    first, again = known.take_out({"context": prompt}), known.take_out({"context": prompt.clone()})
    (key,) = first.new
    assert first.kwargs == again.kwargs == {"context": Kept(key)} and not again.new
    assert torch.equal(first.new[key], prompt)


def test_what_the_caller_writes_later_is_another_tensor():
    known, prompt = KnownTensors(), torch.randn(LARGE)
    first = known.take_out({"context": prompt})
    prompt += 1
    second = known.take_out({"context": prompt})
    assert first.new.keys().isdisjoint(second.new) and len(second.new) == 1


def test_lists_of_references_are_looked_through_and_small_or_changing_ones_sent_as_they_are():
    known, reference, small = KnownTensors(), torch.randn(LARGE), torch.randn(3)
    control = {"input": [torch.randn(LARGE)]}
    found = known.take_out({"ref_latents": [reference, small], "control": control, "name": "x"})
    assert isinstance(found.kwargs["ref_latents"][0], Kept) and found.kwargs["ref_latents"][1] is small
    assert found.kwargs["control"] is control and found.kwargs["name"] == "x" and len(found.new) == 1


def test_other_dtypes_and_shapes_are_other_tensors():
    known, ones = KnownTensors(), torch.ones(LARGE)
    known.take_out({"context": ones})
    assert known.take_out({"context": ones.double()}).new
    assert known.take_out({"context": ones.flatten()}).new


def test_the_least_recently_used_make_room(monkeypatch):
    monkeypatch.setattr(tensor_cache, "MOST_BYTES", 3 * 32 * 1024)
    known, prompts = KnownTensors(), [torch.full(LARGE, float(n)) for n in range(4)]
    keys = [next(iter(known.take_out({"context": prompt}).new)) for prompt in prompts[:3]]
    assert not known.take_out({"context": prompts[0]}).new
    known.take_out({"context": prompts[3]})
    assert known.take_forgotten() == (keys[1],) and known.take_forgotten() == ()
    assert known.take_out({"context": prompts[1]}).new


def test_one_call_may_have_more_than_there_is_room_for(monkeypatch):
    monkeypatch.setattr(tensor_cache, "MOST_BYTES", 1)
    known = KnownTensors()
    found = known.take_out({"a": torch.zeros(LARGE), "b": torch.ones(LARGE)})
    assert len(found.new) == 2 and known.take_forgotten() == ()


def test_dropped_ones_are_sent_again_and_forgotten():
    known, prompt = KnownTensors(), torch.randn(LARGE)
    first = known.take_out({"context": prompt})
    known.drop(first.new)
    assert known.take_forgotten() == tuple(first.new)
    assert known.take_out({"context": prompt}).new
