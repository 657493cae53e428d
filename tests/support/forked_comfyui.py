"""ComfyUI as a fork of the fork server: libraries are most of its start, and of the start of a fork server of its own.

`python -m tests.support.forked_comfyui MAIN …` runs ComfyUI's main.py with these arguments. Its ranks are forks of a
server that is a fork of it.
"""

from __future__ import annotations

import atexit
import os
import runpy
import sys
import threading
from pathlib import Path


def _main() -> None:
    support = Path(__file__).parent
    sys.path.insert(0, str(support))
    import forked_ranks
    from parallel_backend.sidecar.group import supervisor
    from parallel_backend.wire.parent_death import die_with_parent
    from tests.support.fork_server import show_as

    forked_ranks.HERE = forked_ranks.ForkedSubprocess(supervisor)
    forked_ranks.HERE.fork_server_here()
    die_with_parent(os.getppid())
    # ComfyUI imports the pack under another name, and must not find it, or the tests, under this one.
    for name in [name for name in sys.modules if name.partition(".")[0] in ("parallel_backend", "tests")]:
        del sys.modules[name]
    comfyui = Path(sys.argv[1]).parent
    others = [path for path in sys.path if path not in ("", str(support), str(supervisor.PACK_ROOT))]
    sys.path[:], sys.argv[:] = [str(comfyui), *others], sys.argv[1:]
    os.chdir(comfyui)
    show_as([sys.executable, *sys.argv])
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:  # what an interpreter does at its end, which a fork does not reach
        threading._shutdown()
        atexit._run_exitfuncs()


if __name__ == "__main__":
    _main()
