"""Jobs are pickled into bytes and tensors, and unpickled in a rank, which puts its own objects in."""

from __future__ import annotations

import importlib
import sys
import threading
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel_backend.errors import RequestError
from parallel_backend.job.payload import Head, pack_payload
from parallel_backend.job.pickling import pickle_job
from parallel_backend.job.reducers import RankObjects
from parallel_backend.job.tensors import FindInFile, PlaceInFile, SentTensors
from parallel_backend.job.unpickling import unpack_payload, unpickle_job


class Patcher:
    """Stands in for ComfyUI's ModelPatcher."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.backup, self.object_patches_backup, self.hook_backup = model, {}, {}, {}
        self.load_device = torch.device("cpu")
        self.patches = {"a": 1}

    def is_dynamic(self) -> bool:
        return False


class Rank:
    """A rank, with its own copy of the network and the tensors that it has received."""

    def __init__(self) -> None:
        self.network = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        self.tensors: dict[int, Tensor] = {}
        self.sent = SentTensors()
        self.files: dict[tuple[Any, ...], Tensor] = {}

    def ship(self, job: object, known: dict[int, tuple[str, ...]] | None = None, *files: FindInFile):
        """Returns the object as the rank unpickles it; sets `latest` to the pickled job."""
        self.latest = pickle_job(job, known or {}, self.sent, Patcher, *files)
        self.tensors |= {int(number): one.clone() for number, one in self.latest.tensors.items()}
        here = RankObjects(
            device=torch.device("cpu"),
            resolve=lambda word: self.network.get_submodule(word[1]),
            find_module=importlib.import_module,
            local_patcher=lambda: Patcher(self.network),
            other_patcher=lambda: Patcher(nn.Identity()),
            server=lambda: "the server",
            stored=lambda *place: self.files[place],
            tensors=self.tensors,
        )
        return unpickle_job(self.latest.data, here)[0]


@pytest.fixture
def rank() -> Rank:
    return Rank()


def test_modules_that_the_rank_holds_are_named_and_their_weights_stay(rank):
    mine = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    found = rank.ship({"layer": mine[1]}, {id(mine[1]): ("module", "1")})
    assert found["layer"] is rank.network[1]
    assert rank.latest.tensors == {}


class Control:
    def name(self) -> str:
        return "stock's"


class OtherControl(Control):
    """Stores `super()` to call its parent class's methods, as ControlNets of packs do."""

    def __init__(self) -> None:
        self.parent = super()

    def name(self) -> str:
        return f"a pack's, over {self.parent.name()}"


def test_an_object_that_keeps_its_super_goes(rank):
    found = rank.ship([OtherControl()])[0]
    assert found.name() == "a pack's, over stock's" and found.parent.__self__ is found


def test_a_tensor_that_lies_in_a_file_is_read_there(rank):
    place = PlaceInFile("control.safetensors", "as it was", "weight", 7)
    stored = rank.files[tuple(place)] = torch.ones(2, 2)
    weight = nn.Parameter(torch.ones(2, 2))
    job = {"one": weight, "again": weight, "other": torch.zeros(1)}
    found = rank.ship(job, None, lambda tensor: place if tensor is weight else None)
    assert found["one"].data_ptr() == stored.data_ptr() and isinstance(found["one"], nn.Parameter)
    assert found["again"] is found["one"]
    assert [tensor.shape for tensor in rank.latest.tensors.values()] == [(1,)]


def test_a_tensor_is_sent_once_until_somebody_writes_into_it(rank):
    tensor = torch.arange(3.0)
    assert torch.equal(rank.ship([tensor])[0], tensor)
    assert len(rank.latest.tensors) == 1
    rank.ship([tensor])
    assert rank.latest.tensors == {}
    tensor += 1
    assert torch.equal(rank.ship([tensor])[0], tensor)
    assert len(rank.latest.tensors) == 1
    assert rank.sent.take_dropped() == [1]


def test_a_tensor_of_inference_mode_is_known_by_its_values(rank):
    with torch.inference_mode():
        tensor = torch.arange(3.0)
        rank.ship([tensor])
        rank.ship([tensor])
        assert rank.latest.tensors == {}
        tensor.add_(1)
        assert torch.equal(rank.ship([tensor])[0], tensor)


def test_the_number_of_a_tensor_that_is_gone_is_dropped_once(rank):
    rank.ship([torch.ones(2)])
    rank.latest = None
    assert rank.sent.take_dropped() == [1]
    assert rank.sent.take_dropped() == []


def test_one_tensor_twice_is_one_tensor_there(rank):
    tensor = torch.ones(2)
    first, second = rank.ship([tensor, tensor])
    assert first is second


def test_two_functions_that_share_a_cell_share_it_there(rank):
    def make():
        count = 0

        def add():
            nonlocal count
            count += 1

        def read():
            return count

        return add, read

    add, read = rank.ship(make())
    add()
    assert read() == 1
    assert make()[1]() == 0


def test_a_function_by_value_keeps_the_globals_of_its_module(rank):
    def function():
        return MARK

    found = rank.ship([function])[0]
    globals()["MARK"] = "changed afterwards"
    assert found() == "changed afterwards"
    assert __name__ in rank.latest.modules


MARK = "as it was"


def test_a_function_of_no_module_keeps_its_globals_and_what_it_closes_over(rank):
    """Such functions come from code that a node runs with `exec`, and from dataclasses (`__init__` is a closure)."""
    space: dict = {"__name__": "of no module", "step": 2}
    exec(  # noqa: S102
        "def counter():\n"
        "    count = 40\n"
        "    def add():\n"
        "        nonlocal count\n"
        "        count += step\n"
        "        return count\n"
        "    return add, lambda: count\n",
        space,
    )
    add, count = rank.ship(space["counter"]())
    assert (count(), add(), count()) == (40, 42, 42)


def test_what_lies_in_a_module_with_a_path_for_its_name_is_found_by_it(rank, monkeypatch):
    """ComfyUI names the modules of its extra nodes by their path, whose folder names can contain dots."""
    name = "/home/user/ComfyUI-1.0/comfy_extras/nodes_cache"
    module = types.ModuleType(name)
    module.Holder = type("Holder", (), {"__module__": name})
    module.hold = types.FunctionType(test_one_tensor_twice_is_one_tensor_there.__code__, vars(module), "hold")
    module.hold.__qualname__ = "hold"
    monkeypatch.setitem(sys.modules, name, module)
    assert rank.ship([module.Holder, module.hold]) == [module.Holder, module.hold]
    assert type(rank.ship([module.Holder()])[0]) is module.Holder
    assert name in rank.latest.modules


def test_the_jobs_own_patcher_is_made_over_the_ranks_model_and_another_travels(rank):
    mine, other = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(3, 3)
    patcher = Patcher(mine)
    patcher.patches = {"b": 2}
    found, second = rank.ship([patcher, Patcher(other)], {id(mine): ("base",)})
    assert found.model is rank.network
    assert found.patches == {"b": 2}
    assert torch.equal(second.model.weight, other.weight)


def test_modules_of_classes_and_functions_are_told_so_that_ranks_import_their_packs_first(rank):
    rank.ship([Patcher.is_dynamic, Rank])
    assert __name__ in rank.latest.modules
    rank.ship([threading.current_thread])
    assert __name__ not in rank.latest.modules
    assert "threading" in rank.latest.modules


def test_a_generator_goes_on_where_it_was(rank):
    generator = torch.Generator().manual_seed(3)
    torch.rand(2, generator=generator)
    found = rank.ship([generator])[0]
    assert torch.equal(torch.rand(2, generator=found), torch.rand(2, generator=generator))


class Holder:
    def __init__(self) -> None:
        self.lock = threading.Lock()


def test_what_cannot_be_pickled_is_refused_with_what_holds_it(rank):
    with pytest.raises(
        RequestError, match=r"cannot be given this job.*lock.*held by .*Holder.*take the node out"
    ):
        rank.ship({"options": Holder()})


def test_weights_that_lie_on_the_devices_cannot_travel(rank):
    with pytest.raises(RequestError, match="weights that lie on the devices"):
        rank.ship([torch.empty(2, device="meta")])


def test_a_quantised_tensor_goes_by_its_parts(rank):
    class Quantised(Tensor):
        _params = ()

    tensor = torch.ones(2).as_subclass(Quantised)
    assert rank.ship([tensor])[0].tolist() == [1.0, 1.0]


class PackedTensor(torch.Tensor):
    """A tensor class as packs define for their own formats (GGUF): the bytes, and the shape of the real tensor."""


def test_a_tensor_of_a_packs_own_class_keeps_it_and_its_values_are_sent_beside(rank):
    packed = torch.arange(6, dtype=torch.uint8).as_subclass(PackedTensor)
    packed.tensor_shape = torch.Size([3])
    layer = nn.Linear(1, 1)
    layer.weight = nn.Parameter(packed, requires_grad=False)
    found = rank.ship({"packed": packed, "again": packed, "layer": layer})
    assert type(found["packed"]) is PackedTensor and found["packed"].tensor_shape == torch.Size([3])
    assert found["packed"].tolist() == [0, 1, 2, 3, 4, 5] and found["again"] is found["packed"]
    assert isinstance(found["layer"].weight, PackedTensor)
    assert isinstance(found["layer"].weight, nn.Parameter) == isinstance(layer.weight, nn.Parameter)
    assert sorted(one.numel() for one in rank.latest.tensors.values()) == [1, 6, 6]


def test_a_payload_is_plain_values_and_copies():
    prints = {"a": ("torch.float32", (1,), b"1234")}
    head = Head(b"job", True, (1,), None, ("pack",), "stay", ("a model", 8), prints, {})
    payload = pack_payload(head, {"7": torch.ones(2)})
    found, tensors = unpack_payload(payload)
    assert found == head
    assert torch.equal(tensors[7], torch.ones(2)) and tensors[7].data_ptr() != payload["7"].data_ptr()


@pytest.mark.parametrize("stay_shared", [True, False])
def test_the_weights_of_a_module_stay_in_the_memory_that_all_ranks_share(stay_shared):
    payload = pack_payload(Head(b"job", True, (), None, (), "", (), None, {}), {"7": torch.ones(2)})
    _, tensors = unpack_payload(payload, stay_shared=stay_shared)
    assert (tensors[7].data_ptr() == payload["7"].data_ptr()) == stay_shared


def test_nothing_of_this_is_loaded_by_looking_at_it():
    """Unpickling calls the functions that a pickle names, so pickling must not unpickle anything."""

    class Spring:
        def __reduce__(self):
            return (sys.exit, (1,))

    assert pickle_job([Spring()], {}, SentTensors(), Patcher).data


def lock_class(kind: type) -> type:
    """Returns a locked copy of `kind`, made as ComfyUI locks the class of a node that it runs."""

    class LockedMeta(type(kind)):
        def __setattr__(cls, name: str, value: object) -> None:
            raise AttributeError(name)

    clone = type(f"{kind.__name__}Clone", (kind, *kind.__bases__), dict(vars(kind)))
    return LockedMeta(clone.__name__, clone.__bases__, dict(vars(clone)))


def test_the_locked_copy_of_a_nodes_class_becomes_the_class(rank):
    locked = lock_class(Patcher)
    assert rank.ship({"cls": locked, "made": lambda: locked})["cls"] is Patcher
