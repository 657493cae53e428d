"""Faults for ranks that start next, and scripts that act as ComfyUI's process on a machine with few resources."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

from parallel_backend.options import FAULT
from parallel_backend.sidecar.group.supervisor import PACK_ROOT

_CLONE_NEWNS, _CLONE_NEWUTS = 0x00020000, 0x04000000  # <linux/sched.h>


@contextmanager
def fault(kind: str, point: str, *, rank: int = 1, step: int = 0, once: Path | None = None) -> Iterator[None]:
    """Gives ranks that start inside the block a fault (rank_programs/faults.py), which they keep. `once`: a file that
    the fault creates when it fires; if the file exists, the fault does nothing."""
    words = {"rank": rank, "step": step, "kind": kind, "point": point, "once": once and str(once)}
    module = "tests.support.rank_programs.faults"
    with patch.dict(os.environ, {FAULT: f"{module} {json.dumps(words)}"}):
        yield


PROLOGUE = """
import os
from pathlib import Path
from fault_injection import fault
from parallel_backend.errors import RankFailed
from scripted import scripted_request, scripted_sidecar, scripted_weights, two_ranks
weights = scripted_weights(Path({folder!r}) / "good.safetensors", "good 0.5")
"""
# Two kinds of custom nodes that exist: one waits for any child process, one makes the kernel reap all children.
REAPING_THREAD = """
import threading, time
def reap():
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            time.sleep(0.001)
threading.Thread(target=reap, daemon=True).start()
"""
CHILDREN_IGNORED = """
import signal
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
"""
ONE_JOB = """
sidecar = scripted_sidecar()
for _ in range(2):
    sidecar.sample(weights, scripted_request(), two_ranks(), on_step=lambda *step: None)
sidecar.stop()
print("fine")
"""
FEW_DESCRIPTORS = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
"""
# torch's default port is in use.
BESIDE_OTHERS = f"""
import socket
taken = socket.socket()
try:
    taken.bind(("127.0.0.1", 29500))
    taken.listen()
except OSError:  # the other script has it
    pass
{ONE_JOB}
"""
OUT_OF_HOST_MEMORY = """
sidecar = scripted_sidecar(resumes=True)
with fault("exhaust", "an all-reduce"):
    try:
        sidecar.sample(weights, scripted_request(), two_ranks())
    except RankFailed as error:
        print(error)
sidecar.sample(weights, scripted_request(), two_ranks())
sidecar.stop()
print("fine")
"""


@contextmanager
def in_control_group(limit_bytes: int) -> Iterator[str | None]:
    """Yields lines with which a process joins a control group with this memory limit, or None if not allowed."""
    group = Path(f"/sys/fs/cgroup/memory/parallel-faults-{os.getpid()}")
    try:
        group.mkdir()
    except OSError:
        yield None
        return
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
        yield f"import os\nopen({str(group / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
    finally:
        group.rmdir()


def full_temporary_folder(folder: Path) -> str | None:
    """Returns lines after which `folder` is the full temporary folder, and /dev/shm has 1 MB, for the process that runs
    them and for its children, or None if not allowed."""
    folder.mkdir()
    full = _in_namespace(
        _CLONE_NEWNS,
        "mount --make-rprivate / && mount -t tmpfs -o size=1m none /dev/shm && "
        f"mount -t tmpfs -o size=64k none {folder} && "
        f"{{ head -c 200k /dev/zero > {folder}/ballast || true; }}",
    )
    return (
        full and f"{full}\nimport os, tempfile\nos.environ['TMPDIR'] = tempfile.tempdir = {str(folder)!r}\n"
    )


def without_hostname() -> str:
    """Returns lines after which the host's name does not resolve for the process that runs them and for its children,
    or "" if not allowed."""
    return _in_namespace(_CLONE_NEWUTS, "hostname no.such.host.invalid") or ""


def _in_namespace(kind: int, command: str) -> str | None:
    """Returns lines that move a process to a namespace of its own and run `command` there, or None if not allowed."""
    lines = f"""
import ctypes, subprocess
assert ctypes.CDLL(None).unshare({kind}) == 0
subprocess.run(["sh", "-c", {command!r}], check=True)
"""
    return None if subprocess.run([sys.executable, "-c", lines], capture_output=True).returncode else lines


def start_script(script: str, folder: Path, before: str = "") -> subprocess.Popen:
    """Starts a process with a separate supervisor. `weights` in `script` is a file in `folder` for scripted ranks;
    `before`: lines that run first. forked_scripts.py does the same without an import."""
    search = os.pathsep.join([str(PACK_ROOT), str(PACK_ROOT / "tests" / "support")])
    return subprocess.Popen(
        [sys.executable, "-c", before + PROLOGUE.format(folder=str(folder)) + textwrap.dedent(script)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": search},
        text=True,
    )


def run_script(script: str, folder: Path, before: str = "") -> str:
    """Runs a script and returns what it prints."""
    with start_script(script, folder, before) as process:
        return process.communicate(timeout=120)[0]
