"""Text encoders, VAEs and a model share two simulated cards of 16 GiB: what is needed next stays on them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest

from comfy_modules import import_comfyui_here
from pack_nodes import import_node_module
from parallel_backend.errors import Cancelled, OutOfMemory
from parallel_backend.job.answer_tree import pack_tree
from parallel_backend.planner.workload.fit import Capacity
from parallel_backend.requests import LoadInfo, ModelSpec
from parallel_backend.sidecar import pool
from parallel_backend.sidecar.group.lease import State
from parallel_backend.sidecar.holdings import RankHoldings, RankInventory
from parallel_backend.sidecar.model_room import CountedModule, new_number
from parallel_backend.sidecar.module_requests import ALL_DEVICES, AUTO, ModuleKind, ModuleRequest
from parallel_backend.sidecar.sidecar import Sidecar
from parallel_backend.strategy import ParallelStrategy
from parallel_backend.wire.protocol import ALL_RANKS, Done, KeepModels, Load, RankCall, RankModels, RunJob

GIB = 2**30
CARDS = ("cuda:0", "cuda:1")
CARD, MODEL, ENCODER, VAE = 16 * GIB, 12 * GIB, 11 * GIB, GIB
TEXT, DECODER = new_number(), new_number()
WORKING = GIB  # bytes that a job needs on each card, besides the weights


class Cards:
    """Simulates the ranks on two cards: holds models and modules as far as there is room, and counts the bytes copied
    onto the cards. The part of a module that does not fit is copied for each call, as ComfyUI does. `fail(cards)` runs
    before each module call and may raise."""

    devices, running, state = CARDS, True, State.READY

    def __init__(self) -> None:
        self.models: dict[int, int] = {}  # bytes on each card
        self.modules: dict[int, list[int]] = {}  # bytes that are on each card
        self.wanted: dict[int, list[int]] = {}  # bytes that a call needs on each card
        self.copied = 0
        self.phases: list[str] = []
        self.fail: Callable[[Cards], None] = lambda cards: None

    @contextmanager
    def lease(self, request, should_cancel=None, on_phase=None, waits=True):
        yield SimpleNamespace(
            exchange=self.exchange, on_phase=lambda phase: self.phases.append(phase.text), file=None
        )

    def retry_after_crash(self, attempt, lease, survive=None):
        return attempt()

    def working(self):
        pass

    def exchange(self, survivable=frozenset()):
        return _Exchange(self)

    def free(self, card):
        return CARD - sum(self.models.values()) - sum(sizes[card] for sizes in self.modules.values())

    def report(self):
        held = (*self.modules, *self.models)
        return [RankModels(held, self.free(card), CARD) for card in (0, 1)]

    def keep(self, numbers):
        self.models = {number: size for number, size in self.models.items() if number in numbers}
        self.modules = {number: sizes for number, sizes in self.modules.items() if number in numbers}

    def take(self, message):
        if isinstance(message, RunJob):
            self.fail(self)
            self._bring(message.model)
            return [Done(call=RankCall(1.0, 0))] * 2
        if isinstance(message, KeepModels):
            self.keep(message.models)
            return [Done(models=held) for held in self.report()]
        assert isinstance(message, Load)
        self.keep(message.keep)
        if message.spec is None:
            size = SIZES[message.model]
            sizes = [size // 2] * 2 if message.rank == ALL_RANKS else [0, 0]
            if message.rank != ALL_RANKS:
                sizes[message.rank] = size
            self.wanted[message.model], self.modules[message.model] = sizes, [0, 0]
            others = [number for number in (*self.modules, *self.models) if number != message.model]
            reports = [replace(one, models=(*others, message.model)) for one in self.report()]
        else:
            size = MODEL // (2 if message.strategy.shards else 1)
            if size > min(map(self.free, (0, 1))):
                raise OutOfMemory("a card is full")
            self.models[message.model], sizes = size, [size] * 2
            self.copied += 2 * size
            reports = self.report()
        infos = [LoadInfo(1.0, size, False, "float16", "float16", device_bytes=size) for size in sizes]
        return [Done(load=info, models=held) for info, held in zip(infos, reports, strict=True)]

    def _bring(self, number):
        """Copies the parts of a module that are not on their card yet."""
        there, sizes = self.modules[number], self.wanted[number]
        self.copied += sum(sizes) - sum(there)
        self.modules[number] = [there[card] or min(sizes[card], self.free(card)) for card in (0, 1)]


class _Exchange:
    def __init__(self, cards):
        self._cards, self.result = cards, pack_tree("an answer")

    def send(self, message, tensors=None):
        self._message = message

    def wait(self, budget, on_message=None):
        return self._cards.take(self._message)


SIZES = {TEXT: ENCODER, DECODER: VAE}


@pytest.fixture
def cards():
    return Cards()


@pytest.fixture
def sidecar(cards, monkeypatch):
    found = Sidecar(CARDS)
    found._ranks, found._holdings = cards, RankHoldings(cards)
    monkeypatch.setattr(pool, "all_sidecars", lambda: (found,))
    monkeypatch.setattr(pool, "_sidecars", {CARDS: found})
    return found


@pytest.fixture
def spec(tmp_path):
    """Returns the spec of a model of MODEL bytes."""
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.truncate(MODEL)  # a sparse file
    return ModelSpec(path=str(path))


@pytest.fixture
def prompt(sidecar, cards, spec, monkeypatch):
    """Returns run(strategy), which runs a prompt with a new text as nodes do: the text, the plan, the model, and with
    `decodes` a VAE. With `is_named`, the model is known before the text. It returns (GiB copied onto cards, notes)."""
    import_comfyui_here()
    offload = import_node_module("nodes.host.offload")
    monkeypatch.setattr(Capacity, "of", staticmethod(lambda devices: Capacity((CARD, CARD), (0, 0))))
    monkeypatch.setattr(offload.memory_in_use, "used_by_ranks", lambda device: 0)
    monkeypatch.setattr(offload, "_movable", lambda device: iter(()))

    def run(strategy, *, decodes=False, is_named=False):
        before = cards.copied
        own = MODEL // (2 if strategy.shards else 1)
        if is_named:
            pool.leave_room_for(CARDS, spec, own)
        sidecar.call_module(request(TEXT, ModuleKind.TEXT, AUTO))
        plan = SimpleNamespace(
            devices=CARDS, strategy=strategy, memory=SimpleNamespace(private_bytes=own + WORKING)
        )
        notes = offload.offload_comfyui_models(plan)
        sidecar.load(spec, strategy)
        for card in (0, 1):
            assert cards.free(card) >= WORKING
        if decodes:
            sidecar.call_module(request(DECODER, ModuleKind.VAE_DECODER, ALL_DEVICES))
        return (cards.copied - before) / GIB, notes

    return run


def request(number, kind, placement):
    return ModuleRequest(
        kind,
        number,
        tuple(SIZES),
        SIZES[number],
        import_comfyui_here(),
        module=lambda holdings: {},
        tensors=lambda holdings, is_new: {},
        placement=placement,
    )


SHARDED, WHOLE = ParallelStrategy(ulysses_degree=2, shard_weights=True), ParallelStrategy(ulysses_degree=2)


def test_an_encoder_for_which_there_is_room_beside_the_model_stays_and_nothing_moves(prompt):
    """The encoder's 11 GiB are on one card at first, and half on each card once each holds 6 GiB of the model."""
    copied, notes = zip(*(prompt(SHARDED) for _ in range(4)), strict=True)
    assert copied == (11 + 12, 11, 0, 0)
    assert len(notes[0]) == 1 and notes[1:] == ((), (), ())
    assert "text encoders and VAEs made room on cuda:0: 11.0 GiB of them left it in" in notes[0][0]


@pytest.mark.parametrize("decodes", [False, True])
def test_an_encoder_leaves_room_to_a_model_that_the_prompt_has_named_and_nothing_moves_twice(prompt, decodes):
    copied, notes = zip(*(prompt(SHARDED, decodes=decodes, is_named=True) for _ in range(3)), strict=True)
    assert copied == (11 + 12 + decodes, 0, 0) and notes == ((), (), ())


def test_a_model_that_leaves_no_room_is_named_in_vain(prompt):
    assert [prompt(WHOLE, is_named=True)[0] for _ in range(3)] == [11 + 24, 11, 11]


def test_a_model_that_fills_the_cards_stays_and_the_encoder_comes_once_for_each_text(prompt):
    copied, notes = zip(*(prompt(WHOLE) for _ in range(3)), strict=True)
    assert copied == (11 + 24, 11, 11)
    assert [len(words) for words in notes] == [1, 2, 2]


def test_a_vae_stays_where_there_is_room(prompt, cards):
    assert [prompt(SHARDED, decodes=True)[0] for _ in range(3)] == [11 + 12 + 1, 11, 0]
    assert {number: sum(sizes) for number, sizes in cards.modules.items()} == SIZES


def test_a_model_for_which_there_is_no_room_takes_that_of_the_encoder(sidecar, cards, spec):
    """No plan has made room before the load."""
    sidecar.call_module(request(TEXT, ModuleKind.TEXT, ALL_DEVICES))
    sidecar.load(spec, WHOLE)
    assert cards.modules == {} and list(cards.models.values()) == [MODEL]
    assert not sidecar._holdings.held.has_modules_on_devices


MAKING_ROOM = "memory ended; going on without the other models"


@pytest.mark.parametrize("ends", [False, True])
def test_where_memory_ends_beside_models_they_go_and_a_vae_has_another_try(sidecar, cards, spec, ends):
    """ComfyUI does the same: a VAE that needs room takes that of the model that sampled."""

    def fail(cards):
        if cards.models or ends:
            raise OutOfMemory("no room")

    cards.fail = fail
    decode = request(DECODER, ModuleKind.VAE_DECODER, ALL_DEVICES)
    sidecar.load(spec, SHARDED)
    if ends:
        with pytest.raises(OutOfMemory):
            sidecar.call_module(decode)
    else:
        assert sidecar.call_module(decode).value == "an answer"
    assert cards.models == {} and cards.phases.count(MAKING_ROOM) == 1
    if ends:  # now no model is held that could go
        with pytest.raises(OutOfMemory):
            sidecar.call_module(decode)
        assert cards.phases.count(MAKING_ROOM) == 1


def test_a_call_that_fails_leaves_its_encoder_on_the_device(sidecar, cards):
    """The next plan counts the encoder, and the next call does not send it again."""

    def fail(cards):
        raise Cancelled("by hand")

    cards.fail = fail
    for _ in range(2):
        with pytest.raises(Cancelled):
            sidecar.call_module(request(TEXT, ModuleKind.TEXT, AUTO))
        assert cards.phases.count("sending the text encoder to the processes") == 1
        assert pool.module_bytes("cuda:0", TEXT) == ENCODER


def test_what_comfyui_is_told_of_an_encoder_is_what_lies_on_its_device(sidecar):
    assert [pool.module_bytes(card, TEXT) for card in CARDS] == [0, 0]
    sidecar.call_module(request(TEXT, ModuleKind.TEXT, AUTO))
    sidecar.call_module(request(DECODER, ModuleKind.VAE_DECODER, ALL_DEVICES))
    assert [pool.module_bytes(card, TEXT) for card in CARDS] == [ENCODER, 0]
    assert [pool.module_bytes(card) for card in CARDS] == [ENCODER + VAE // 2, VAE // 2]
    pool.drop_modules()
    assert [pool.module_bytes(card) for card in CARDS] == [0, 0]


def test_on_the_cpu_they_take_no_device():
    held = RankInventory(("cpu:0", "cpu:1"))
    infos = tuple(LoadInfo(1.0, size, False, "", "", device_bytes=size) for size in (ENCODER, 0))
    held.modules = {1: CountedModule(0, infos)}
    assert not held.has_modules_on_devices and held.numbers == (1,)
