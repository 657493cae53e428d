"""Changes that a job makes in copies of its objects are stored in the objects themselves."""

from __future__ import annotations

import collections
import copy
import enum
import functools
import importlib
import random
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from parallel_backend.job import state_changes
from parallel_backend.job.pickling import pickle_job
from parallel_backend.job.reducers import RankObjects
from parallel_backend.job.restore import AS_IMPORTED, Replaced, is_as_imported
from parallel_backend.job.state_changes import (
    StateChanges,
    Variables,
    global_generators,
    store_changes,
    variables_by_number,
)
from parallel_backend.job.tensors import OF_DEVICES, SentTensors
from parallel_backend.job.unpickling import unpickle_job

CPU, _META = torch.device("cpu"), torch.device("meta")


class Holder:
    """An object of a pack's class."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)


class Layer(nn.Linear):
    """A module of a pack's class."""


class Guider(Holder):
    """A guider of a pack's class."""

    def outer_sample(self) -> None: ...


def _on_a_copy(job: object, run: Callable[[Any], object], device: torch.device = CPU) -> list[str]:
    """Runs `run` on a copy of `job` as a rank with this device does, and stores what has changed in `job`; returns what
    cannot be."""
    sent = SentTensors()
    pickled = pickle_job(job, {}, sent, SimpleNamespace)
    here = RankObjects(
        device=device,
        resolve=lambda word: None,
        find_module=importlib.import_module,
        local_patcher=object,
        other_patcher=object,
        server=object,
        stored=lambda *place: torch.empty(0),
        tensors={int(number): one.clone() for number, one in pickled.tensors.items()},
    )
    unpickled, objects = unpickle_job(pickled.data, here)
    state = StateChanges(objects)
    run(unpickled)
    store_changes(pickled.objects, state.packed())
    return list(state.names)


def _as_bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def _counting() -> Callable[[], tuple[int, int]]:
    calls = 0

    def count(seen: list[None] = []) -> tuple[int, int]:  # noqa: B006, functions keep state here too
        nonlocal calls
        calls += 1
        seen.append(None)
        return calls, len(seen)

    return count


VALUES = {
    "a number": 3.5,
    "a text": "seen",
    "nothing": None,
    "nested containers": {("block", 3): [1, (2.5, {"a"}, None)], 7: {"deep": [True]}},
    "a dtype and a shape": (torch.bfloat16, torch.Size([2, 3]), CPU),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_plain_value_keeps_its_type(name):
    holder = Holder(value=0)
    assert _on_a_copy(holder, lambda copy: setattr(copy, "value", VALUES[name])) == []
    assert holder.value == VALUES[name]
    assert repr(holder.value) == repr(VALUES[name])


def test_two_objects_that_hold_one_tensor_still_do_so():
    first, second = Holder(seen=None), Holder(seen=None)

    def run(copies: list[Holder]) -> None:
        copies[0].seen = copies[1].seen = torch.arange(3.0)

    _on_a_copy([first, second], run)
    assert first.seen is second.seen
    assert first.seen.tolist() == [0, 1, 2]


def test_a_tensor_of_a_ranks_device_waits_in_host_memory_and_is_on_the_device_in_the_next_job():
    holder, seen = Holder(total=torch.zeros(2), other=torch.zeros(1)), []
    OF_DEVICES[holder.total] = True  # as a job has left it
    _on_a_copy(holder, lambda copy: seen.extend([copy.total.device.type, copy.other.device.type]), _META)
    assert seen == ["meta", "cpu"]

    numbers = {0: holder}
    tensor = {"changes": _as_bytes('[[0, [[["str", "total"], ["tensor", 5, 0, false]]], []]]')}
    store_changes(numbers, {**tensor, "changes.5": torch.ones(2)})
    assert holder.total in OF_DEVICES
    assert holder.total.tolist() == [1, 1]


def test_a_tensor_that_was_written_in_place_has_the_new_values():
    holder = Holder(total=torch.zeros(2), other=torch.zeros(2))
    other = holder.other
    _on_a_copy(holder, lambda copy: copy.total.add_(1))
    assert holder.total.tolist() == [1, 1]
    assert holder.other is other


def test_an_object_of_the_job_stays_the_same_object():
    inner, shared = Holder(calls=0), [1]
    holder = Holder(inner=inner, latest=None, lists={"a": shared}, again=shared)

    def run(copy: Holder) -> None:
        copy.inner.calls = 2
        copy.latest = copy.inner
        copy.lists["a"].append(2)

    _on_a_copy(holder, run)
    assert holder.latest is holder.inner is inner
    assert inner.calls == 2
    assert holder.lists["a"] is holder.again is shared
    assert shared == [1, 2]


def test_what_was_taken_out_is_gone():
    holder = Holder(bank={"old": 1, "kept": 2}, extra=3, order=collections.deque([1, 2, 3]), names={"a", "b"})

    def run(copy: Holder) -> None:
        del copy.bank["old"], copy.extra
        copy.order.popleft()
        copy.names.discard("a")

    _on_a_copy(holder, run)
    assert vars(holder) == {"bank": {"kept": 2}, "order": collections.deque([2, 3]), "names": {"b"}}


def test_functions_keep_their_variables_defaults_and_arguments():
    count, partial = _counting(), functools.partial(list.append, [])
    _on_a_copy([count, partial], lambda copies: (copies[0](), copies[1](5)))
    assert count() == (2, 2)
    assert partial.args == ([5],)


def test_a_module_keeps_what_its_code_sets_but_not_its_weights():
    layer = Layer(2, 2)
    weight = layer.weight

    def run(copy: Layer) -> None:
        copy.calls = 4
        copy.weight = nn.Parameter(torch.zeros(2, 2))

    assert _on_a_copy(layer, run) == []
    assert layer.calls == 4
    assert layer.weight is weight


def test_what_comfyui_sets_on_a_guider_while_it_samples_is_left_out():
    guider = Guider(conds={"positive": [1]}, seen=0)

    def run(copy: Guider) -> None:
        copy.conds, copy.inner_model, copy.seen = {"positive": [torch.zeros(4)]}, object(), 1

    assert _on_a_copy(guider, run) == []
    assert vars(guider) == {"conds": {"positive": [1]}, "seen": 1}


GENERATORS = {
    "torch": (torch.Generator, lambda one: torch.rand(1, generator=one).item()),
    "Python": (lambda: random.Random(1), random.Random.random),
    "numpy, old": (lambda: numpy.random.RandomState(1), numpy.random.RandomState.random),
    "numpy": (lambda: numpy.random.default_rng(1), numpy.random.Generator.random),
    "numpy, Mersenne Twister": (
        lambda: numpy.random.Generator(numpy.random.MT19937(1)),
        numpy.random.Generator.random,
    ),
}


@pytest.mark.parametrize("kind", GENERATORS)
def test_a_random_generator_goes_on(kind):
    make, draw = GENERATORS[kind]
    holder, alike = Holder(generator=make()), make()
    _on_a_copy(holder, lambda copy: draw(copy.generator))
    draw(alike)
    assert draw(holder.generator) == draw(alike)


def test_the_processs_generators_are_those_that_its_functions_draw_from():
    before = StateChanges(global_generators(CPU))
    torch.rand(1), random.random(), numpy.random.rand()
    changes = before.packed()
    expected = torch.rand(1).item(), random.random(), numpy.random.rand()
    torch.manual_seed(3), random.seed(3), numpy.random.seed(3)
    store_changes(global_generators(CPU), changes)
    assert (torch.rand(1).item(), random.random(), numpy.random.rand()) == expected


def test_nothing_is_sent_if_nothing_has_changed():
    holder = Holder(bank={"a": [1, torch.zeros(2)]}, generator=torch.Generator())
    pickled = pickle_job(holder, {}, SentTensors(), SimpleNamespace)
    state = StateChanges(pickled.objects)
    holder.bank["a"][0] = 1
    assert state.packed() == {}


def test_what_cannot_be_sent_is_named_and_the_rest_is_stored():
    holder, ring = Holder(calls=0, made=None), []
    ring.append(ring)

    def run(copy: Holder) -> None:
        copy.made, copy.ring, copy.calls = SimpleNamespace(), ring, 1

    assert _on_a_copy(holder, run) == ["test_state_changes.Holder"]
    assert vars(holder) == {"calls": 1, "made": None}


def test_code_that_each_job_finds_anew_is_not_named():
    holder = Holder(function=None, calls=0)
    assert _on_a_copy(holder, lambda copy: vars(copy).update(function=print, calls=1)) == []
    assert vars(holder) == {"function": None, "calls": 1}


def test_too_many_bytes_are_named_and_the_rest_is_stored(monkeypatch):
    monkeypatch.setattr(state_changes, "MOST_BYTES", 100)
    holder = Holder(small=None, large=None)

    def run(copy: Holder) -> None:
        copy.small, copy.large = torch.zeros(20), torch.zeros(6)

    assert _on_a_copy(holder, run) == ["test_state_changes.Holder"]
    assert holder.large is None
    assert holder.small.shape == (20,)


@pytest.fixture
def pack(monkeypatch) -> ModuleType:
    """A pack's module in a rank, right after its import."""
    module = ModuleType("pack")
    vars(module).update(
        calls=0, bank={"seen": [1]}, memory=Holder(total=0), layer=None, tensor=torch.zeros(1)
    )
    monkeypatch.setitem(sys.modules, "pack", module)
    return module


def _run_with_variables(pack: ModuleType, run: Callable[[], object]) -> tuple[dict[str, Any], list[str]]:
    """Runs `run` as a rank does, with all variables of the pack as the import has set them; returns what the variables
    of ComfyUI's process, which were the same, are then, and the names of those that it lacks."""
    names = ("calls", "bank", "memory", "layer", "tensor")
    here, there = (
        [Replaced("pack", "", name, AS_IMPORTED) for name in names] for _ in ("the rank", "ComfyUI's process")
    )
    variables = Variables(here)
    values = {name: copy.deepcopy(getattr(pack, name)) for name in names}
    state = StateChanges(variables_by_number(here) | dict(enumerate(here)))
    run()
    variables.note()
    changes = state.packed()
    variables.put_back(state.unsent)
    mine = {-1000 - place: value for place, value in enumerate(values.values())}
    store_changes(mine | dict(enumerate(there)), changes)
    set_again = {one.name: one.value for one in there if not is_as_imported(one)}
    return values | set_again, list(state.names)


def test_what_a_job_has_set_in_variables_is_in_comfyuis_process_and_no_longer_in_the_rank(pack):
    bank, memory, tensor = pack.bank, pack.memory, pack.tensor

    def run() -> None:
        pack.calls += 1
        pack.bank["seen"].append(2)
        pack.bank["new"] = 3
        pack.memory.total = 4
        pack.tensor = torch.ones(1)

    values, unsent = _run_with_variables(pack, run)
    assert unsent == []
    assert (values["calls"], values["bank"], values["memory"].total) == (1, {"seen": [1, 2], "new": 3}, 4)
    assert values["tensor"].tolist() == [1]
    assert (pack.calls, pack.bank, pack.memory.total, pack.tensor) == (0, {"seen": [1]}, 0, tensor)
    assert pack.bank is bank
    assert pack.memory is memory


def test_what_comfyuis_process_cannot_have_stays_in_the_rank(pack):
    """Such as a model that a pack loads once: each job would load it again."""
    layer = nn.Linear(1, 1)

    def run() -> None:
        pack.layer = layer
        pack.memory.layers = {"one": layer}
        pack.calls = 1

    values, _ = _run_with_variables(pack, run)
    assert (pack.layer, pack.memory.layers, pack.calls) == (layer, {"one": layer}, 0)
    assert (values["layer"], values["calls"]) == (None, 1)


class Mode(enum.Enum):
    """A class of a pack whose attributes cannot be set."""

    SIGMA = "sigma"


def test_what_a_job_has_not_changed_is_not_set_again():
    variables = Variables([Replaced(__name__, "Mode", "SIGMA", AS_IMPORTED)])
    variables.note()
    variables.put_back([])
    assert Mode.SIGMA.value == "sigma"
