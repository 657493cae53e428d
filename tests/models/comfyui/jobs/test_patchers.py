"""Patches on weights that ranks share out give what they give on whole weights, in each format, and leave no trace."""

from __future__ import annotations

import torch

from comfy_weight_files import CPU, FORMATS, OLD, answer, spec, write
from differences import relative_difference
from parallel_backend.engine.comm.groups import Layouts
from parallel_backend.engine.load import load_under
from parallel_backend.models.comfyui.jobs.patchers import root_patcher
from parallel_backend.models.comfyui.load import load
from parallel_backend.strategy import ParallelStrategy
from ranks import run_ranks

TOLERANCE = 1e-5
FORMS = ["fp32", "bf16", "fp8", *FORMATS, OLD]


def answers(model):
    """Returns the answers (with patches on the first block of each kind and around the blocks, without them again)."""
    patcher = root_patcher(model)
    for number, (key, weight) in enumerate(model.originals.items()):
        if "_blocks.1." not in key and weight.ndim:
            change = torch.randn(weight.shape, generator=torch.Generator().manual_seed(number))
            patcher.add_patches({key: ("diff", (0.05 * change,))})
    patcher.patch_model(CPU)
    patched = answer(model)
    patcher.unpatch_model(CPU)
    return patched, answer(model)


def shared_out(world, paths):
    strategy, layouts = ParallelStrategy(cfg_degree=world.world_size, shard_weights=True), Layouts(world)
    return {form: answers(load_under(spec(path), layouts, strategy)) for form, path in paths.items()}


def test_a_patch_on_shares_gives_what_it_gives_on_whole_weights(tmp_path):
    paths = {form: str(write(tmp_path / f"{number}.safetensors", form)) for number, form in enumerate(FORMS)}
    expected = {form: answers(load(spec(path), CPU)) for form, path in paths.items()}
    for found in run_ranks(shared_out, 2, paths):
        for form, (patched, unpatched) in expected.items():
            assert relative_difference(unpatched, patched) > 1e-2, form
            assert relative_difference(found[form][0], patched) <= TOLERANCE, form
            assert relative_difference(found[form][1], unpatched) <= TOLERANCE, form
