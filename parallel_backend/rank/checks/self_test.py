"""Tests classes of a ComfyUI against the table: `python -m parallel_backend.rank.checks.self_test --root … --class …`.

Writes one line of JSON (wire/checks/self_test.SelfTest) per class to stdout. It runs on the CPU and never touches a
GPU: the order and the number of tokens, which it tests, are the same on all devices.
"""

from __future__ import annotations

import argparse
import json
import os
import sys

from ...wire.parent_death import die_with_parent
from ...wire.strict_json import to_json

_NO_GPU = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", required=True, help="ComfyUI's folder")
    parser.add_argument(
        "--class", dest="classes", nargs="+", required=True, help="as in models/tokens/table.py"
    )
    parser.add_argument("--parent", type=int, help="process id of the parent, with which this ends")
    arguments = parser.parse_args()
    if arguments.parent is not None:
        die_with_parent(arguments.parent)
    os.environ |= dict.fromkeys(_NO_GPU, "")
    # What ComfyUI and libraries print goes to stderr, away from the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    # Imported after die_with_parent: the parent may die during these seconds.
    import torch

    torch.set_num_threads(1)  # ranks are forked, and a thread pool does not survive a fork
    from ...models.comfyui.environment import import_comfyui
    from ...requests import ComfyUISource
    from .module_parity import prove

    # Without ComfyUI's own command-line flags: they choose dtypes and kernels, not what is a token.
    import_comfyui(ComfyUISource(arguments.root), torch.device("cpu"))
    for name in arguments.classes:
        print(json.dumps(to_json(prove(name)), allow_nan=False), file=answers, flush=True)


if __name__ == "__main__":
    main()
    sys.stderr.flush()
