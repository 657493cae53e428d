"""Messages arrive as they were sent, and malformed frames are refused."""

import json
from dataclasses import replace

import pytest

from parallel_backend.errors import TransportError
from parallel_backend.options import CompileStats
from parallel_backend.requests import ComfyUISource, LoadInfo, ModelSpec, Placement, RunInfo
from parallel_backend.strategy import ParallelStrategy
from parallel_backend.wire.calibration import Calibration, RankFacts, Transfer
from parallel_backend.wire.checks.findings import CheckSubject, Finding, SelfTest
from parallel_backend.wire.protocol import (
    MAX_MESSAGE_BYTES,
    Calibrate,
    Cancel,
    Compiling,
    Done,
    Envelope,
    Failed,
    Hello,
    KeepModels,
    Load,
    MoveOut,
    Progress,
    ProveClasses,
    RankCall,
    RankModels,
    RunCheck,
    RunJob,
    Setup,
    TakeBack,
    decode,
    encode,
)

PLACEMENT = Placement(ParallelStrategy(cfg_degree=2, ulysses_degree=2), engine="native")
CALIBRATION = Calibration(
    rank=1,
    backend="nccl",
    strategy=PLACEMENT.strategy,
    transfers=(Transfer("pair", 4096, 4096, seconds=1e-5, peer=0, intact=False),),
    collective_s=2e-5,
    facts=RankFacts("GPU-1", peers=(False, True), all_reduce_error=0.0, kernel="flash", kernel_problem=""),
)
SUBJECT = CheckSubject(
    ("cpu:0",),
    "/models/a.safetensors",
    is_demo=False,
    pixels=128,
    odd_pixels=(120, 136),
    text=8,
    steps=4,
    attention_tokens=96,
)
# (message, number of payloads that it comes with)
FILE = ModelSpec(path="/models/flüx 1.safetensors", weight_dtype="bfloat16")
SAMPLING = RunJob(PLACEMENT, 4, previews=True, cfg=3.5)
MESSAGES = [
    (Hello(python="3.11.7", torch="2.13.0"), 0),
    (Setup(1, devices=("cuda:0", "cuda:3"), rendezvous="/tmp/a b"), 0),
    (Done(), 0),
    (Load(FILE, ParallelStrategy(pipefusion_degree=2, device_shares=(2, 1)), model=3, keep=(2, 1)), 0),
    (SAMPLING, 1),
    (Cancel(), 0),
    (Progress(step=1, steps=20, seconds=0.25), 0),
    (Progress(step=1, steps=20, seconds=0.25), 1),
    (Done(load=LoadInfo(1.0, bytes=4, cached=False, dtype="bfloat16", compute_dtype="bfloat16")), 0),
    (Compiling(), 0),
    (
        Done(
            run=RunInfo(
                "native", PLACEMENT.strategy, bytes_sent=(10,), notes=("a", "b"), inside_seconds=((0.5,),)
            )
        ),
        1,
    ),
    (Done(run=RunInfo("native", PLACEMENT.strategy, compiled=CompileStats(2, 9.5, 0))), 1),
    (KeepModels((2, 1)), 0),
    (ProveClasses(ComfyUISource("/ComfyUI"), ("Flux",)), 0),
    (Done(proofs=(SelfTest("Flux", "stay", worst=1e-7),)), 0),
    (MoveOut(rank=1, model=2), 0),
    (TakeBack(), 0),
    (Done(models=RankModels((2, 1), free_bytes=7, total_bytes=9)), 0),
    (Calibrate(PLACEMENT.strategy, budget_s=2, thorough=True), 0),
    (Done(calibration=CALIBRATION), 0),
    (RunCheck("device", SUBJECT), 0),
    (Done(findings=(Finding("device", "ok", "the CPU", details=("2 threads",)),)), 0),
    (Load(None, ParallelStrategy(), 7, (3, 1), rank=1, comfyui=ComfyUISource("/ComfyUI")), 1),
    (RunJob(PLACEMENT, steps=4, previews=True, model=3), 1),
    (RunJob(None, steps=64, model=7), 1),
    (Done(call=RankCall(1.5, 20, parts=64, peak_bytes=0)), 1),
    (Failed(kind="RequestError", message="no", detail="Traceback…"), 0),
]
FRAME = json.loads(encode(Envelope(3, 4, Progress(step=1, steps=2, seconds=0.5))))


def changed(**changes):
    return json.dumps({**FRAME, **changes}).encode()


@pytest.mark.parametrize(("message", "payloads"), MESSAGES)
def test_a_message_arrives_as_it_was_sent(message, payloads):
    assert decode(encode(Envelope(3, 4, message)), payloads) == Envelope(3, 4, message)


def test_a_whole_number_goes_out_as_a_float_where_the_field_is_one():
    sent = Calibrate(PLACEMENT.strategy, budget_s=2, thorough=True)
    received = decode(encode(Envelope(1, 1, sent)), 0).message
    assert type(received.budget_s) is float


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "JSON"),
        (b"[]", "version None"),
        (b"\xff\xfe", "JSON"),
        (b"[" * 60_000, "JSON"),
        (b'{"version":1,"version":1}', "twice"),
        (changed(version=1), "version 1"),
        (changed(op="Shutdown"), "unknown message 'Shutdown'"),
        (changed(op="Envelope"), "unknown message"),
        (changed(op=["Progress"]), "unknown message"),
        (changed(extra=1), "wrong fields"),
        (json.dumps({k: v for k, v in FRAME.items() if k != "epoch"}).encode(), "wrong fields"),
        (changed(epoch="3"), "epoch: expected int"),
        (changed(request=True), "request: expected int"),
        (changed(body={"step": 1, "steps": 2}), "expected the fields"),
        (changed(body={"step": 1, "steps": 2, "seconds": 0.5, "more": 0}), "expected the fields"),
        (changed(body={"step": 1.0, "steps": 2, "seconds": 0.5, "strategy": 0}), "step: expected int"),
        (changed(body={"step": 1, "steps": 2, "seconds": 1, "strategy": 0}), "seconds: expected float"),
        (changed(body=None), "expected the fields"),
        (encode(Envelope(1, 1, Cancel())).replace(b"{}", b'{"a":NaN}'), "NaN"),
        (b'{"version":1}' + b" " * MAX_MESSAGE_BYTES, "limit"),
    ],
)
def test_a_frame_that_deviates_is_refused(data, reason):
    with pytest.raises(TransportError, match=reason):
        decode(data)


def test_a_dataclass_that_checks_itself_is_refused_as_a_frame():
    frame = json.loads(encode(Envelope(1, 1, SAMPLING)))
    frame["body"]["placement"]["strategy"]["cfg_degree"] = 0
    with pytest.raises(TransportError, match="cfg_degree is 0"):
        decode(json.dumps(frame).encode(), 1)


@pytest.mark.parametrize(("message", "payloads"), [(Cancel(), 1), (SAMPLING, 0), (SAMPLING, 2)])
def test_a_message_comes_with_the_payloads_it_must_have(message, payloads):
    with pytest.raises(TransportError, match="payloads"):
        decode(encode(Envelope(1, 1, message)), payloads)


def test_a_message_over_the_limit_is_not_sent():
    with pytest.raises(TransportError, match=str(MAX_MESSAGE_BYTES)):
        encode(Envelope(1, 1, Load(ModelSpec(path="x" * MAX_MESSAGE_BYTES), ParallelStrategy(), 1, ())))


def test_a_number_that_is_none_is_not_sent():
    with pytest.raises(ValueError):
        encode(Envelope(1, 1, replace(MESSAGES[7][0], seconds=float("nan"))))
