"""Tests classes of a ComfyUI against the table: `python -m parallel_backend.rank.checks.self_test --root … --class …`.

One line of JSON (wire/self_test.SelfTest) per class on stdout. It runs on the CPU and never touches a GPU: what it
finds out, the order and the number of tokens, is the same on all devices.
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
    # What ComfyUI and libraries print goes beside the answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    # Only now what takes seconds: the parent may die meanwhile.
    import torch

    torch.set_num_threads(1)  # ranks are forked, and a pool of threads does not live on in a fork
    from ...models.comfyui.environment import import_comfyui
    from ...requests import ComfyUISource
    from .module_parity import prove

    # Without the flags that ComfyUI was started with: they choose dtypes and kernels, not what is a token.
    import_comfyui(ComfyUISource(arguments.root), torch.device("cpu"))
    for name in arguments.classes:
        print(json.dumps(to_json(prove(name)), allow_nan=False), file=answers, flush=True)


if __name__ == "__main__":
    main()
    sys.stderr.flush()
