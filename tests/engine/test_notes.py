"""The notes of a request: each once, and none of an earlier request's calls."""

from __future__ import annotations

from types import SimpleNamespace

from parallel_backend.engine.notes import Notes
from parallel_backend.rank.work.held_models import HeldModel


def test_notes_on_calls_end_with_their_request_and_lasting_ones_stay():
    notes = Notes()
    notes.add_lasting("sharded", "no kernel", "sharded")
    notes.add("bands")
    notes.add("bands")
    notes.add("sharded")
    assert list(notes) == ["sharded", "no kernel", "bands"]
    notes.begin()
    assert list(notes) == ["sharded", "no kernel"]


def test_every_forward_of_a_model_begins_with_a_request():
    begun: list[int] = []
    held = HeldModel(SimpleNamespace())
    held.forwards = {number: SimpleNamespace(begin=lambda n=number: begun.append(n)) for number in (1, 2)}
    held.begin_request()
    assert begun == [1, 2]
