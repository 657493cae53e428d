"""Signs of life distinguish a process that computes from one that sleeps or waits for others."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from parallel_backend.sidecar.group.liveness import is_computing, last_beat


def group(pids, *, inside=(False, False), since=(1.0, 2.0), devices=("cpu:0", "cpu:1")):
    beats = [SimpleNamespace(inside=i, since=s) for i, s in zip(inside, since, strict=True)]
    return SimpleNamespace(
        devices=devices, heartbeat=SimpleNamespace(read=beats.__getitem__), pid_of=pids.__getitem__
    )


@pytest.fixture
def process():
    started = []

    def start(code: str) -> int:
        started.append(
            subprocess.Popen([sys.executable, "-c", f"print(1, flush=True)\n{code}"], stdout=subprocess.PIPE)
        )
        started[-1].stdout.readline()
        return started[-1].pid

    yield start
    for one in started:
        one.kill()
        one.wait()
        one.stdout.close()


def test_the_last_beat_is_the_latest_of_those_that_owe_an_answer():
    assert last_beat(group([1, 2]), {0, 1}) == 2.0
    assert last_beat(group([1, 2]), {0}) == 1.0


def test_one_that_computes_is_seen_beside_one_that_sleeps(process):
    spinning, sleeping = process("while True: pass"), process("import time; time.sleep(60)")
    assert is_computing(group([sleeping, spinning]), {0, 1})
    assert not is_computing(group([sleeping, spinning]), {0})


def test_one_in_a_collective_waits_for_others_even_if_it_polls(process):
    spinning = process("while True: pass")
    assert not is_computing(group([spinning, spinning], inside=(True, True)), {0, 1})


def test_on_a_gpu_a_busy_processor_tells_nothing(process):
    spinning = process("while True: pass")
    assert not is_computing(group([spinning, None], devices=("cuda:0", "cuda:1")), {0, 1})


def test_one_that_is_gone_does_not_compute():
    assert not is_computing(group([None, 2**22 + 1]), {0, 1})
