"""The ranks that decode and encode: running ranks with a model stay, even if other devices were chosen since."""

from types import SimpleNamespace

import pytest
import torch

from pack_nodes import module_fixture
from parallel_backend.errors import OutOfMemory, PlatformError
from parallel_backend.planner.rules import StrategySettings
from parallel_backend.sidecar import pool
from parallel_backend.sidecar.group.lease import State
from parallel_backend.strategy import ParallelStrategy

CHOSEN = ("cpu:0", "cpu:1")

vae_ranks = module_fixture("nodes.job.vae")
module = module_fixture("nodes.vae_nodes")


@pytest.mark.parametrize(
    ("state", "models", "used"),
    [
        (State.READY, ("a model",), 1),
        (State.ASLEEP, (), 1),  # its model comes back with the next prompt
        (State.READY, (), 2),  # it holds at most a VAE
        (None, (), 2),
    ],
)
def test_ranks_on_fewer_devices_than_were_chosen_stay_for_the_sake_of_a_model_alone(
    vae_ranks, monkeypatch, state, models, used
):
    running = SimpleNamespace(devices=CHOSEN[:1], state=state, models=models)
    monkeypatch.setattr(pool, "running_within", lambda devices: running if state else None)
    monkeypatch.setattr(pool, "get_sidecar", lambda devices: SimpleNamespace(devices=devices))
    sidecar, _, notes = vae_ranks.choose_ranks(StrategySettings(devices="cpu:2"))
    assert sidecar.devices == CHOSEN[:used] and bool(notes) == (used == 1)


def test_room_is_made_on_the_gpus_of_the_ranks_where_comfyui_has_something(vae_ranks, monkeypatch):
    management, freed = vae_ranks.comfy.model_management, []
    loaded = [SimpleNamespace(device=torch.device(name)) for name in ("cuda:0", "cuda:2")]
    monkeypatch.setattr(management, "current_loaded_models", loaded)
    monkeypatch.setattr(management, "free_memory", lambda size, device: freed.append((size, str(device))))
    for devices in (("cuda:1", "cuda:2"), ("cuda:0@box/one", "cuda:0@box/two"), CHOSEN):
        vae_ranks.make_room(8.0, SimpleNamespace(devices=devices))
    assert freed == [(4.0, "cuda:2")], "ComfyUI's own cuda:0 is none of theirs"


def given_to(monkeypatch, vae_ranks, *, devices=CHOSEN, shares=()):
    """Sends a VAE's pictures to ranks on `devices`."""
    sidecar = SimpleNamespace(devices=devices)
    monkeypatch.setattr(vae_ranks, "choose_ranks", lambda settings: (sidecar, shares, []))
    monkeypatch.setattr(vae_ranks, "setting", {"try_strategies": True}.__getitem__)


def vae_of():
    return SimpleNamespace(latent_dim=2, vae_dtype=torch.float32, first_stage_model=SimpleNamespace())


@pytest.fixture
def timed(vae_ranks, monkeypatch):
    """Replaces VaeChoice by a class that has fixed times and stores in `kept` what is recorded."""

    class Timed:
        alone_seconds, shared_seconds, kept, gave_up = 0.4, 0.1, [], False

        def __init__(self, history, network, size, *, tries):
            self.network, self.size, self.tries = network, size, tries

        def is_alone(self):
            return True

        def record(self, seconds, *, is_alone):
            self.kept.append((seconds, is_alone))
            Timed.alone_seconds = Timed.shared_seconds = 9.0  # a slow run moves the medians

        def give_up(self):
            Timed.gave_up = True

    monkeypatch.setattr(vae_ranks, "VaeChoice", Timed)
    return Timed


MANUAL = StrategySettings(mode="manual", strategy=ParallelStrategy(ulysses_degree=2))


@pytest.mark.parametrize(
    ("settings", "options", "free", "shares"),
    [
        (StrategySettings(), {}, 3.0, (1.0, 0.0)),
        (StrategySettings(), {}, 2.9, ()),  # one device lacks memory for a whole picture
        (StrategySettings(compared=True), {}, 3.0, ()),
        (StrategySettings(device_shares="2,1"), {"shares": (2.0, 1.0)}, 3.0, (2.0, 1.0)),
        (MANUAL, {}, 3.0, ()),
        (StrategySettings(), {"devices": CHOSEN[:1]}, 3.0, ()),
    ],
    ids=["auto", "little memory", "a comparison", "shares by hand", "degrees by hand", "one device"],
)
def test_one_device_computes_where_that_is_faster_and_nobody_has_chosen(
    vae_ranks, monkeypatch, timed, settings, options, free, shares
):
    given_to(monkeypatch, vae_ranks, **options)
    monkeypatch.setattr(vae_ranks, "read_free_bytes", lambda device: free)
    out = vae_ranks.SharedOut(settings, vae_of(), torch.zeros(2, 4, 8, 6), 2.0, encodes=False)
    assert out.shares == shares and out.choice.size == (4, 8, 6) and out.choice.tries
    assert out.choice.network == "SimpleNamespace decode torch.float32"


@pytest.mark.parametrize("is_too_large", [False, True])
def test_a_try_that_memory_ends_is_the_last_and_what_is_too_large_for_all_devices_is_left_to_comfyui(
    vae_ranks, module, monkeypatch, timed, is_too_large
):
    """ComfyUI cuts it into tiles."""
    given_to(monkeypatch, vae_ranks)
    asked = []

    class Shipment:
        def __init__(self, vae, inputs, shares, *, encodes):
            self.shares = shares

        def run(self, sidecar, on_step):
            asked.append(self.shares)
            if self.shares or is_too_large:
                raise OutOfMemory("Process 0 ran out of memory on cuda:0")
            return "the answer"

    monkeypatch.setattr(module, "VaeShipment", Shipment)
    inputs = torch.zeros(1, 4, 8, 8)
    out = module.SharedOut(StrategySettings(), vae_of(), inputs, 0.0, encodes=False)
    if is_too_large:
        with pytest.raises(module.CannotBeSplit, match="memory ended on the devices: Process 0 ran out"):
            module._ask(vae_of(), inputs, out, encodes=False)
    else:
        assert module._ask(vae_of(), inputs, out, encodes=False) == "the answer"
    assert asked == [(1.0, 0.0), ()] and timed.gave_up and not out.is_alone


def test_where_ranks_cannot_run_it_is_left_to_comfyui(vae_ranks, module, monkeypatch, timed):
    def run(sidecar, on_step):
        raise PlatformError("it needs Linux")

    given_to(monkeypatch, vae_ranks)
    monkeypatch.setattr(module, "VaeShipment", lambda *_, **__: SimpleNamespace(run=run))
    inputs = torch.zeros(1, 4, 8, 8)
    out = module.SharedOut(StrategySettings(), vae_of(), inputs, 0.0, encodes=False)
    with pytest.raises(module.CannotBeSplit, match="it needs Linux"):
        module._ask(vae_of(), inputs, out, encodes=False)


def test_shares_by_hand_tell_nothing_of_equal_ones(vae_ranks, monkeypatch, timed):
    for shares in ((2.0, 1.0), ()):
        given_to(monkeypatch, vae_ranks, shares=shares)
        out = vae_ranks.SharedOut(MANUAL, vae_of(), torch.zeros(1, 4, 8, 6), 2.0, encodes=False)
        out.record(0.5)
    assert timed.kept == [(0.5, False)]


@pytest.mark.parametrize(
    ("alone", "alone_s", "shared_s", "gain", "line"),
    [
        (False, 0.4, 0.1, 0.6, "each: 0.1 s, 4.0 × as fast as one device"),
        (False, None, 0.1, None, None),
        (True, None, 0.1, None, "tried on one device, to know what sharing it out gains"),
        (True, 0.1, 0.4, None, "each: 0.1 s; the rows stay together, since shared out they took 0.4 s"),
    ],
)
def test_what_sharing_out_gains_counts_for_the_prompt_where_both_were_timed(
    vae_ranks, module, monkeypatch, timed, alone, alone_s, shared_s, gain, line
):
    given_to(monkeypatch, vae_ranks)
    timed.alone_seconds, timed.shared_seconds, gains = alone_s, shared_s, []
    monkeypatch.setattr(module.PHASES, "add_gain", lambda prompt_id, seconds: gains.append(seconds))
    out = module.SharedOut(StrategySettings(), vae_of(), torch.zeros(2, 4, 8, 8), 0.0, encodes=False)
    out.is_alone = alone
    lines = module._speed(SimpleNamespace(seconds=0.2), 2, out)
    assert timed.kept == [(0.1, alone)]
    assert gains == ([] if gain is None else [pytest.approx(gain)])
    assert [one.startswith(line) for one in lines] == ([] if line is None else [True])
