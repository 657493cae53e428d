"""The supervisor starts ranks, notices their end, and leaves nothing of them behind."""

import errno
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from parallel_backend.errors import RankFailed
from parallel_backend.sidecar.group import supervisor as supervisor_module
from parallel_backend.sidecar.group.exchange import Exchange
from parallel_backend.sidecar.group.group import join_ranks
from parallel_backend.sidecar.group.supervisor import PACK_ROOT, get_supervisor
from parallel_backend.sidecar.process import rank_process
from parallel_backend.sidecar.process.environment import rank_environment
from parallel_backend.sidecar.process.rank_process import MAX_OUTPUT
from parallel_backend.sidecar.sidecar import Sidecar, State
from parallel_backend.wire import deadlines
from scripted import is_running
from waiting import PATIENCE, wait_until

pytestmark = [pytest.mark.usefixtures("no_leaks"), pytest.mark.real_start]


@pytest.fixture
def spawn():
    groups = []

    def start(module, count=2):
        group = get_supervisor().spawn(tuple(f"cpu:{i}" for i in range(count)), module)
        groups.append(group)
        return group

    yield start
    for group in groups:
        get_supervisor().kill(group)
        group.close()


def python(*arguments, **options):
    """Returns what a new Python prints."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=60, **options)
    assert not done.returncode, done.stderr
    return done.stdout


@pytest.mark.parametrize("what", ["memfd_create", "pidfd_open"])
def test_a_start_without_descriptors_leaves_nothing(spawn, monkeypatch, what):
    def none_left(*_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, what, none_left)
    with pytest.raises(OSError, match="Too many open files"):
        spawn("tests.support.rank_programs.scripted_rank", count=1)


def test_a_rank_that_floods_and_ignores_sigterm_is_killed_in_time(spawn):
    group = spawn("tests.support.rank_programs.flooding_rank")
    members = list(group.ranks)
    wait_until(lambda: all(member.output for member in members))  # SIGTERM is ignored from here on
    begun = time.monotonic()
    get_supervisor().stop(group, grace=0.3)
    assert time.monotonic() - begun >= 0.3
    assert [member.process.returncode for member in members] == [-signal.SIGKILL] * 2


def test_only_the_end_of_a_flood_is_kept(spawn):
    group = spawn("tests.support.rank_programs.flooding_rank", count=1)
    member = group.ranks[0]
    kept, drain = [], member.drain
    member.drain = lambda: (drain(), kept.append(len(member.output)))[0]
    wait_until(lambda: len(kept) > 50 and kept[-1] == MAX_OUTPUT)
    assert max(kept) == MAX_OUTPUT


def test_the_first_death_is_the_reason_and_the_others_are_killed(spawn):
    group = spawn("tests.support.rank_programs.flooding_rank")
    first, other = group.pids
    os.kill(first, signal.SIGSEGV)
    assert group.gone.wait(PATIENCE)  # the other does not end by itself
    assert group.death.rank == 0
    assert group.death.exit_status.words.startswith("killed by SIGSEGV")
    assert not is_running(other)


def test_a_rank_that_cannot_import_shows_its_traceback():
    sidecar = Sidecar(("cpu:0", "cpu:1"), rank_module="tests.support.rank_programs.broken_rank")
    with pytest.raises(
        RankFailed, match=r"(?s)exited with code 1.*No module named 'a_library_that_is_not_installed'"
    ) as caught:
        sidecar.start()
    assert caught.value.reason == "exit"
    assert sidecar.state is State.FAILED
    sidecar.stop()


def test_an_end_that_cannot_be_collected_is_still_the_end_of_the_group(spawn, monkeypatch):
    def fails(*arguments, **others):
        raise OSError("no file descriptors are left")

    monkeypatch.setattr(rank_process, "describe_exit", fails)
    group = spawn("tests.support.rank_programs.flooding_rank")
    os.kill(group.pids[0], signal.SIGSEGV)
    assert group.gone.wait(PATIENCE)
    assert (group.death.rank, group.death.exit_status.words) == (0, "ended; how is unknown")


def test_stop_gives_up_on_ranks_that_cannot_be_killed(spawn, monkeypatch, caplog):
    group = spawn("tests.support.rank_programs.flooding_rank")
    monkeypatch.setattr(deadlines, "REAP", 0.2)
    with monkeypatch.context() as held:
        held.setattr(supervisor_module, "_signal_all", lambda *arguments: None)  # as if a driver blocked them
        get_supervisor().kill(group)
    assert "do not end" in caplog.text and not group.gone.is_set()
    for pid in group.pids:
        os.kill(pid, signal.SIGKILL)
    assert group.gone.wait(PATIENCE)


def test_a_pack_folder_may_have_spaces_and_dots(tmp_path):
    """Ranks find the pack by its path, whatever name ComfyUI gave the package."""
    folder = tmp_path / "my packs" / "multi.gpu v1.2"
    folder.mkdir(parents=True)
    for part in ("parallel_backend", "tests"):
        (folder / part).symlink_to(PACK_ROOT / part)
    script = textwrap.dedent(
        """
        import importlib.util, sys
        name = sys.argv[1].replace(".", "_x_")  # as ComfyUI names a pack: after its path
        spec = importlib.util.spec_from_file_location(
            name, sys.argv[1] + "/parallel_backend/__init__.py",
            submodule_search_locations=[sys.argv[1] + "/parallel_backend"])
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        import importlib
        client = importlib.import_module(name + ".sidecar.sidecar")
        sidecar = client.Sidecar(("cpu:0",), rank_module="tests.support.rank_programs.scripted_rank")
        sidecar.start()
        print(sidecar.state.name)
        sidecar.stop()
        """
    )
    assert python("-c", script, str(folder), cwd=tmp_path) == "READY\n"


def test_a_rank_sees_its_devices_settings_but_no_secret():
    source = {
        "PATH": "/bin",
        "CUDA_VISIBLE_DEVICES": "1,2",
        "NCCL_P2P_DISABLE": "1",
        "HF_TOKEN": "secret",
        "TORCH_SECRET": "secret",
        "AWS_ACCESS_KEY_ID": "secret",
        "PYTHONPATH": "/site",
        "GLOO_SOCKET_IFNAME": "eth0",
    }
    seen = rank_environment(source, Path("/my pack"), ("cuda:0", "cuda:1"))
    assert "secret" not in seen.values()
    assert (seen["CUDA_VISIBLE_DEVICES"], seen["NCCL_P2P_DISABLE"]) == ("1,2", "1")
    assert seen["PYTHONPATH"] == "/my pack:/site"
    assert seen["GLOO_SOCKET_IFNAME"] == seen["NCCL_SOCKET_IFNAME"] == "lo"


@pytest.mark.parametrize(
    ("flags", "variables", "expected"),
    [
        ([], {}, []),
        ([], {"PYTHONNOUSERSITE": "1"}, ["-s"]),
        (["-I", "-B", "-O"], {}, ["-s", "-E", "-B", "-O"]),
    ],
)
def test_ranks_start_with_the_flags_of_comfyuis_own_python(flags, variables, expected):
    script = "import sys; sys.path[:0] = sys.argv[1:]; from parallel_backend.sidecar.process import environment as e"
    script += "; print(*e.interpreter_flags())"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    assert python(*flags, "-c", script, str(PACK_ROOT), env=kept | variables).split() == expected


def test_a_rank_starts_with_the_flags_and_is_told_that_comfyui_is_deterministic(spawn, monkeypatch):
    sent, send = [], Exchange.send_to
    monkeypatch.setattr(Exchange, "send_to", lambda self, rank, m: (sent.append(m), send(self, rank, m)))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    monkeypatch.setattr(supervisor_module, "interpreter_flags", lambda: ["-s", "-E"])
    group = spawn("tests.support.rank_programs.scripted_rank", count=1)
    join_ranks(group, lambda: False)
    command = Path(f"/proc/{group.pids[0]}/cmdline").read_bytes().split(b"\0")
    assert {b"-u", b"-s", b"-E"} <= set(command)
    assert [setup.deterministic for setup in sent] == [True]


def test_threads_are_shared_out_unless_the_user_set_them(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(12)))
    assert rank_environment({}, Path("/"), ("cpu:0",) * 4)["OMP_NUM_THREADS"] == "3"
    assert rank_environment({}, Path("/"), ("cpu:0",) * 16)["OMP_NUM_THREADS"] == "1"
    assert rank_environment({"OMP_NUM_THREADS": "7"}, Path("/"), ("cpu:0",))["OMP_NUM_THREADS"] == "7"


def test_comfyuis_half_imports_where_posix_is_missing():
    """Windows has no fcntl, memfd or AF_UNIX; the pack must load there and say so when it is used."""
    script = textwrap.dedent(
        """
        import sys, os, socket
        sys.modules["fcntl"] = None
        for name in ("memfd_create", "eventfd", "pidfd_open", "killpg"):
            delattr(os, name)
        for name in ("AF_UNIX", "SOCK_SEQPACKET", "socketpair", "SCM_RIGHTS", "MSG_CMSG_CLOEXEC"):
            delattr(socket, name)
        import parallel_backend.sidecar.pool, parallel_backend.errors
        sys.platform = "win32"
        try:
            parallel_backend.sidecar.pool.get_sidecar(("cuda:0",)).start()
        except parallel_backend.errors.PlatformError as error:
            print(error)
        """
    )
    assert "WSL2" in python("-c", script, env={**os.environ, "PYTHONPATH": str(PACK_ROOT)})
