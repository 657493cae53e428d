"""A rank whose self-tests have a scripted outcome: the name of ComfyUI's folder chooses it."""

import os
import time
from pathlib import Path

from parallel_backend.rank.__main__ import main
from parallel_backend.rank.work.worker import RankWorker
from parallel_backend.wire.checks.findings import SelfTest
from parallel_backend.wire.protocol import Done, ProveClasses


class ScriptedTests(RankWorker):
    def answer(self, message, tensors, request):
        assert isinstance(message, ProveClasses)
        folder = Path(message.comfyui.root)
        if folder.name == "crash":
            os.abort()
        if folder.name == "silent":
            (folder / "pid").write_text(str(os.getpid()))
            time.sleep(60)
        return Done(proofs=tuple(SelfTest(name, "block", 0.07) for name in message.names)), None


if __name__ == "__main__":
    main(ScriptedTests)
