"""A rank whose device runs out of memory while it changes its weights: rank 1, at the last tensor of a set."""

import torch

from parallel_backend.models.diffusers import weights as flux_weights
from parallel_backend.rank.__main__ import main

LAST = "time_in.out_layer.weight"


def apply_until_memory_ends(weight, patches, tensors):
    if patches[0].key == LAST and patches[0].strength == 7.0 and torch.distributed.get_rank() == 1:
        raise torch.OutOfMemoryError("the device is full")
    return apply(weight, patches, tensors)


if __name__ == "__main__":
    apply, flux_weights.apply_patches = flux_weights.apply_patches, apply_until_memory_ends
    main()
