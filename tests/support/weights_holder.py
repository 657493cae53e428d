"""Loads a model and prints the memory that it takes, alone and with a copy: `python weights_holder.py SMALL LARGE`.

Run it in a fresh interpreter: a forked one shares its heap with its parent and gains whatever either of them writes.
Each line of output waits for one line of input, so that several processes can hold their model at the same time.
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
    """Returns the Pss (a page mapped by n processes counts 1 / n) in bytes of the file's pages and of pages without a
    file. Libraries are left out: their Pss changes whenever a process that maps them starts or ends."""
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
    """Loads a model and runs one forward, which reads every weight."""
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
    load_and_run(small)  # takes the memory of every first use, except that of the weights
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
