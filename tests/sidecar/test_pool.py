"""The registry of sidecars: one per device set, and none that overlap."""

import logging
import subprocess
import sys
import textwrap

import pytest

from parallel_backend.errors import Cancelled, RankFailed
from parallel_backend.requests import ModelSpec
from parallel_backend.sidecar import pool
from parallel_backend.sidecar.group.failures import FAILURES_UNTIL_BROKEN
from parallel_backend.sidecar.group.supervisor import PACK_ROOT
from parallel_backend.sidecar.sidecar import State
from scripted import is_held, is_running, ranks_of
from tiny_flux import write_tiny_flux


@pytest.fixture(autouse=True)
def empty_pool(no_leaks):
    yield
    pool.stop_all()


def test_a_group_gives_way_to_one_that_needs_its_devices():
    older = pool.get_sidecar(("cpu:0",))
    apart = pool.get_sidecar(("cpu:7",))
    older.start()
    apart.start()
    pids = older.pids
    newer = pool.get_sidecar(("cpu:0", "cpu:1"))
    assert not any(map(is_running, pids))
    assert older.state is State.DOWN
    assert apart.state is State.READY
    assert pool.all_sidecars() == (apart, newer)


def test_the_largest_running_sidecar_within_a_choice_is_found():
    pool.get_sidecar(("cpu:5",))  # never started
    assert pool.running_within(("cpu:0", "cpu:1", "cpu:2", "cpu:5")) is None
    one, two = pool.get_sidecar(("cpu:0",)), pool.get_sidecar(("cpu:1", "cpu:2"))
    one.start()
    two.start()
    assert pool.running_within(("cpu:0", "cpu:1", "cpu:2")) is two
    assert pool.running_within(("cpu:0", "cpu:1")) is one  # two needs a device that was not chosen
    two.stop()
    assert pool.running_within(("cpu:0", "cpu:1", "cpu:2")) is one


def test_a_reset_lets_broken_groups_start_again_and_leaves_the_others_alone():
    broken, fine = pool.get_sidecar(("cpu:0",)), pool.get_sidecar(("cpu:1",))
    fine.start()
    pids = fine.pids
    for _ in range(FAILURES_UNTIL_BROKEN):
        broken._ranks.crashes.add(RankFailed(0, "killed by SIGKILL"), "cpu:0")
    assert broken.state is State.BROKEN
    with pytest.raises(RankFailed, match="3 times within 10 minutes"):
        broken.start()
    pool.reset()
    assert broken.state is State.DOWN
    assert broken.start() > 0
    assert fine.pids == pids


def test_ranks_stopped_while_they_give_their_memory_back_are_no_warning(tmp_path, monkeypatch, caplog):
    spec = ModelSpec(str(write_tiny_flux(tmp_path / "a.safetensors")))
    sidecar = pool.get_sidecar(("cpu:0",))
    sidecar.load(spec)

    def stopped(*_, **__):
        raise Cancelled("The processes were stopped while they worked on the request.")

    monkeypatch.setattr(sidecar, "sleep", stopped)
    pool.put_to_sleep(spec)
    assert [record.levelname for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_ranks_that_hold_a_model_give_it_back_and_others_keep_theirs(tmp_path):
    specs = [ModelSpec(str(write_tiny_flux(tmp_path / f"{name}.safetensors"))) for name in "ab"]
    sidecars = [pool.get_sidecar((f"cpu:{i}",)) for i in range(2)]
    for sidecar, spec in zip(sidecars, specs, strict=True):
        assert not is_held(spec)
        sidecar.load(spec)
        assert sidecar.models == (spec,) and is_held(spec)
    pool.put_to_sleep(specs[0])
    assert [sidecar.state for sidecar in sidecars] == [State.ASLEEP, State.READY]
    assert not is_held(specs[0]) and is_held(specs[1])
    assert pool.running_within(("cpu:0",)) is sidecars[0]
    assert not sidecars[0].load(specs[0]).cached and is_held(specs[0])
    pool.put_to_sleep(ModelSpec("/nowhere"))
    assert all(sidecar.state is State.READY for sidecar in sidecars)


def test_the_end_of_the_interpreter_ends_the_ranks_but_that_of_a_forked_child_does_not():
    script = textwrap.dedent(
        """
        import os, sys, time
        from parallel_backend.sidecar import pool
        sidecar = pool.get_sidecar(("cpu:0",))
        sidecar.start()
        child = os.fork()
        if child == 0:
            sys.exit()
        os.waitpid(child, 0)
        time.sleep(0.2)
        print(os.getpid(), sidecar.state.name)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=PACK_ROOT, capture_output=True, text=True, timeout=60
    )
    pid, state = done.stdout.split()
    assert state == "READY", done.stderr
    assert ranks_of(int(pid)) == []
