"""A process that loads a model and says what it gained, and with a copy of it: `python weights_holder.py SMALL LARGE`.

Fresh interpreters, because a forked one shares its heap with its parent and gains whatever either of them writes.
Each line of output waits for one line of input, so that several can hold their model at the same time.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from parallel_backend.models.diffusers.load import load
from parallel_backend.models.diffusers.model import DiffusersModel
from parallel_backend.requests import ModelSpec


def proportional_set(path: str) -> int:
    """Bytes of this process, each page that several processes map shared out between them (Pss): of the file and of
    what is no file's. A library's share changes whenever any process of the machine that has it starts or ends."""
    found, wanted = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if not name.endswith(":"):  # "7f00-7f10 r--p 0 08:01 1234  /the/file"
            wanted = line.endswith(path) or len(values) < 5 or not values[4].startswith("/")
        elif wanted and name == "Pss:":
            found += int(values[0]) * 1024
    return found


def say(word: object) -> None:
    print(word, flush=True)
    sys.stdin.readline()


@torch.no_grad()
def load_and_run(path: str) -> DiffusersModel:
    """A forward reads every weight."""
    model = load(ModelSpec(path), torch.device("cpu"))
    config = model.module.transformer.config
    context, pooled = (
        torch.randn(1, 3, config.joint_attention_dim),
        torch.randn(1, config.pooled_projection_dim),
    )
    model.module(torch.randn(1, 16, 4, 4), torch.tensor([0.5]), context, pooled)
    return model


def main(small: str, large: str) -> None:
    torch.set_num_threads(1)
    load_and_run(small)  # what every first use costs, weights aside
    say("warm")
    before = proportional_set(large)
    say("measured")
    model = load_and_run(large)
    say("loaded")
    say(proportional_set(large) - before)
    copy = [parameter.clone() for parameter in model.module.parameters()]
    say("copied")
    say(proportional_set(large) - before)
    del copy


if __name__ == "__main__":
    main(*sys.argv[1:])
