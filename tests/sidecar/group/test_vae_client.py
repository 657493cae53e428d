"""Which VAE the ranks hold, as the parent remembers it; scripted exchanges stand in for the ranks."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from parallel_backend.errors import OutOfMemory, TransportError
from parallel_backend.requests import ComfyUISource, LoadInfo
from parallel_backend.sidecar.group.exchange import USER_ERRORS
from parallel_backend.sidecar.group.phases import Phase, PhaseKind
from parallel_backend.sidecar.group.vae_client import VaeOnRanks
from parallel_backend.sidecar.holdings import RankHoldings
from parallel_backend.sidecar.other_requests import VaeRequests
from parallel_backend.wire.decode_messages import RankDecode, VaeWeights
from parallel_backend.wire.protocol import Decode, Done, Encode, LoadVae, Progress, Ready

LOAD = LoadInfo(seconds=1.0, bytes=12, cached=False, dtype="float32", compute_dtype="float32")
RUN = RankDecode(seconds=2.0, rows=4, bytes_sent=10, peak_bytes=0, compute_dtype="float32")
SOURCE = ComfyUISource("/ComfyUI")
LATENT = torch.zeros(1, 4, 6, 5)
IMAGE = torch.ones(1, 48, 40, 3)


class ScriptedRanks:
    """Answers each request of two ranks as told and keeps what it was sent."""

    def __init__(self):
        self.sent, self.survivable, self.failure = [], [], None
        self.load, self.run, self.result, self.messages = LOAD, RUN, {"image": IMAGE}, []

    def __call__(self, survivable):
        self.survivable.append(survivable)
        return self

    def send(self, message, tensors):
        self.sent.append((message, tensors))

    def wait(self, budget, on_message=None):
        if self.failure is not None:
            raise self.failure
        assert budget() >= 60
        loads = isinstance(self.sent[-1][0], LoadVae)
        for message in () if loads else self.messages:
            on_message(0, message, None)
        done = Done(load=self.load) if loads else Done(decode=self.run)
        return [done, done]


def decode(client, ranks, identity="a", epoch=1, on_step=None, on_phase=lambda phase: None):
    weights = VaeWeights(identity, lambda: {"decoder.conv_in.weight": torch.zeros(3)}, SOURCE)
    return client.decode(epoch, ranks, weights, LATENT, (), on_step, on_phase)


@pytest.fixture
def client():
    return VaeOnRanks(("cpu:0", "cpu:1"))


@pytest.fixture
def ranks():
    return ScriptedRanks()


def kinds(ranks):
    return [type(message) for message, _ in ranks.sent]


def test_weights_are_sent_once_per_group_and_identity(client, ranks):
    for identity, epoch in (("a", 1), ("a", 1), ("b", 1), ("b", 2), ("b", 2)):
        decode(client, ranks, identity, epoch)
    assert kinds(ranks) == [LoadVae, Decode, Decode, LoadVae, Decode, LoadVae, Decode, Decode]
    assert [sorted(tensors) for _, tensors in ranks.sent[:2]] == [["decoder.conv_in.weight"], ["latent"]]


def test_the_result_says_how_every_rank_ran(client, ranks):
    first, again = decode(client, ranks), decode(client, ranks)
    assert torch.equal(first.image, IMAGE)
    assert (first.info.rows, first.info.bytes_sent, first.info.seconds) == ((4, 4), (10, 10), 2.0)
    assert (first.info.load, again.info.load.cached, again.info.load.seconds) == (LOAD, True, 0.0)


def test_phases_and_steps_are_told(client, ranks):
    phases, steps = [], []
    decode(client, ranks)
    ranks.messages = [Progress(step=1, steps=3, seconds=0.1), Progress(step=2, steps=3, seconds=0.1)]
    decode(client, ranks, on_step=lambda *step: steps.append(step), on_phase=phases.append)
    assert phases == [Phase(PhaseKind.DECODING)] and steps == [(1, 3), (2, 3)]


def test_a_failed_load_is_tried_again_by_the_next_decode(client, ranks):
    decode(client, ranks, "a")
    ranks.failure = OutOfMemory("no room")
    with pytest.raises(OutOfMemory):
        decode(client, ranks, "b")
    ranks.failure = None
    decode(client, ranks, "a")
    assert kinds(ranks) == [LoadVae, Decode, LoadVae, LoadVae, Decode]


def test_only_a_load_may_run_out_of_memory_and_leave_the_group(client, ranks):
    decode(client, ranks)
    assert ranks.survivable == [USER_ERRORS | {"OutOfMemory"}, USER_ERRORS]


class _Ranks:
    """Of a sidecar: a lease, and no crash."""

    epoch = 1

    @contextmanager
    def lease(self, request, should_cancel, on_phase):
        yield SimpleNamespace(exchange=None, on_phase=lambda phase: on_phase(phase.text), images=0)

    def through_a_crash(self, attempt, lease):
        return attempt()

    def working(self):
        pass


class _Beside(VaeRequests):
    """Requests to ranks that hold `models`, beside which a VAE has no room for its largest layer."""

    devices = ("cuda:0", "cuda:1")

    def __init__(self, *models):
        self._ranks, self._holdings = _Ranks(), self
        self.models, self.vae = models, self
        self.tries = 0

    beside_models = RankHoldings.beside_models

    def ensure_started(self, lease):
        pass

    def drop(self, spec, lease):
        self.models = tuple(model for model in self.models if model != spec)

    def decode_here(self, *_):
        self.tries += 1
        if self.models or self.tries > 2:
            raise OutOfMemory("no room")
        return "the image"


def _decode_beside(*models):
    ranks, phases = _Beside(*models), []
    ranks.vae = SimpleNamespace(decode=ranks.decode_here)
    return ranks, phases, lambda: ranks.decode(None, LATENT, (), None, phases.append)


def test_where_memory_ends_beside_models_they_go_and_the_vae_has_another_try():
    """As in ComfyUI, where a VAE that needs room takes that of the model that sampled."""
    ranks, phases, decode_on = _decode_beside("flux", "wan")
    assert decode_on() == "the image" and ranks.tries == 2 and ranks.models == ()
    assert phases == ["memory ended; going on without the other models"]


def test_where_memory_ends_though_nothing_is_beside_it_that_is_told():
    ranks, phases, decode_on = _decode_beside()
    ranks.tries = 2
    with pytest.raises(OutOfMemory):
        decode_on()
    assert ranks.tries == 3 and not phases


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"result": {}}, "without the image"),
        ({"run": None}, "without saying how it ran"),
        ({"load": None}, "without saying how it ran"),
        ({"messages": [Ready(seconds=1.0)]}, "sent Ready"),
    ],
)
def test_answers_that_break_the_protocol_are_refused(client, ranks, changes, words):
    for name, value in changes.items():
        setattr(ranks, name, value)
    with pytest.raises(TransportError, match=words):
        decode(client, ranks)


def test_pixels_go_to_an_encoder_that_is_sent_as_one(client, ranks):
    ranks.result, phases = {"latent": LATENT}, []
    weights = VaeWeights("b", lambda: {"encoder.conv_in.weight": torch.zeros(3)}, SOURCE, encodes=True)
    found = client.encode(1, ranks, weights, IMAGE.movedim(-1, 1), (2.0, 1.0), None, phases.append)
    assert [message for message, _ in ranks.sent] == [
        LoadVae("b", SOURCE, encodes=True),
        Encode("b", (2.0, 1.0)),
    ]
    assert torch.equal(found.latent, LATENT) and found.info.rows == (4, 4)
    assert phases == [Phase(PhaseKind.SENDING_VAE), Phase(PhaseKind.ENCODING)]
    ranks.result = {"image": IMAGE}
    with pytest.raises(TransportError, match="without the latent"):
        client.encode(1, ranks, weights, IMAGE.movedim(-1, 1), (), None, phases.append)
