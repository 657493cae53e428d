"""Odd environments in which ComfyUI's process starts ranks: limits, signals, variables, closed streams."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fault_injection import CHILDREN_IGNORED, FEW_DESCRIPTORS, ONE_JOB, REAPING_THREAD, start_script

from .findings import Before, Findings

DEADLINE = 120.0  # s for two small jobs; imports take most of it

SMALL_STACK = """
import resource
resource.setrlimit(resource.RLIMIT_STACK, (512 * 1024, resource.RLIM_INFINITY))
"""
NO_CORE_DUMPS = """
import resource
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
"""
SIGNALS_BLOCKED = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGCHLD})
"""
NO_INPUT = """
import sys
os.close(0)
"""
CLOSED_OUTPUT = """
import sys
sys.stderr.close()
os.close(2)
"""


def _variables(**changes: str | None) -> str:
    lines = ["import os"]
    for name, value in changes.items():
        lines.append(
            f"os.environ.pop({name!r}, None)" if value is None else f"os.environ[{name!r}] = {value!r}"
        )
    return "\n" + "\n".join(lines) + "\n"


ENVIRONMENTS = {
    "256 descriptors": FEW_DESCRIPTORS,
    "a thread that waits for any child": REAPING_THREAD,
    "SIGCHLD ignored": CHILDREN_IGNORED,
    "a small stack": SMALL_STACK,
    "no core dumps": NO_CORE_DUMPS,
    "signals blocked": SIGNALS_BLOCKED,
    "no standard input": NO_INPUT,
    "no standard error": CLOSED_OUTPUT,
    "no HOME": _variables(HOME=None, USER=None),
    "HOME that is not there": _variables(HOME="/does/not/exist"),
    "locale C": _variables(LANG="C", LC_ALL="C", PYTHONUTF8=None),
    "locale that is unknown": _variables(LANG="xx_YY.UTF-8", LC_ALL="xx_YY.UTF-8"),
    "PYTHONNOUSERSITE": _variables(PYTHONNOUSERSITE="1"),
    "PYTHONSAFEPATH": _variables(PYTHONSAFEPATH="1"),
    "PYTHONOPTIMIZE": _variables(PYTHONOPTIMIZE="2"),
    "PYTHONHASHSEED": _variables(PYTHONHASHSEED="0"),
    "another distributed job's variables": _variables(
        RANK="3", WORLD_SIZE="8", LOCAL_RANK="3", MASTER_ADDR="10.0.0.1", MASTER_PORT="29500"
    ),
    "another network interface": _variables(GLOO_SOCKET_IFNAME="does-not-exist0", NCCL_SOCKET_IFNAME="eth9"),
    "no threads for OpenMP": _variables(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1"),
    "nonsense for OpenMP": _variables(OMP_NUM_THREADS="many"),
    "a proxy": _variables(
        http_proxy="http://127.0.0.1:9", https_proxy="http://127.0.0.1:9", ALL_PROXY="socks5://x"
    ),
    "no PATH": _variables(PATH=""),
}


def run_in_each(folder: Path, findings: Findings) -> None:
    """Runs small jobs in each environment, in a separate process for each, as many at a time as there are cores."""
    before = Before()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        folders = [folder / f"environment {number}" for number in range(len(ENVIRONMENTS))]
        for fault in pool.map(_run_in, ENVIRONMENTS, folders):
            findings.prompts += 1
            if fault is not None:
                findings.add(*fault)
    before.compare(findings, "odd environments")


def _run_in(name: str, folder: Path) -> tuple[str, str] | None:
    """Returns (kind of finding, what was found), or None if the jobs succeeded."""
    folder.mkdir()
    with start_script(ENVIRONMENTS[name] + ONE_JOB, folder) as process:
        try:
            said, _ = process.communicate(timeout=DEADLINE)
        except subprocess.TimeoutExpired:
            process.kill()
            return "hangs", name
    return (
        None if "fine" in said else ("wrong", f"{name}: exit code {process.returncode}, said {said[-200:]!r}")
    )
