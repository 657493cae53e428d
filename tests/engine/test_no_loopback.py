"""In a network namespace whose loopback interface is down, the error says so and what to do."""

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = textwrap.dedent(
    """
    import torch
    from parallel_backend.engine.comm.groups import World
    from parallel_backend.errors import PlatformError
    try:
        World(rank=0, world_size=2, device=torch.device("cpu"), backend="gloo", store_path={store!r})
    except PlatformError as error:
        print(error)
    """
)


@pytest.mark.skipif(shutil.which("unshare") is None, reason="no unshare")
def test_a_machine_without_loopback_is_told_what_to_do(tmp_path):
    apart = ["unshare", "--map-root-user", "--net"]  # lo exists there and is down
    if subprocess.run([*apart, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("no network namespace of one's own may be made here")
    done = subprocess.run(
        [*apart, sys.executable, "-c", SCRIPT.format(store=str(tmp_path / "store"))],
        cwd=ROOT,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert "lo is down or missing. Bring it up (ip link set lo up)" in done.stdout, done.stderr
