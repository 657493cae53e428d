"""VAEs on ranks: a new one reuses the groups of the last, and all ranks compute a call or none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from comfy_modules import import_comfyui_here
from parallel_backend.engine.comm.groups import Layouts
from parallel_backend.errors import RequestError
from parallel_backend.job.answer_tree import unpack_tree
from parallel_backend.job.torch_settings import computing_with
from parallel_backend.models.comfyui.environment import import_comfyui
from parallel_backend.rank.jobs.modules import Modules
from parallel_backend.rank.jobs.reader import JobReader
from parallel_backend.strategy import ParallelStrategy
from parallel_backend.wire.protocol import Load
from ranks import run_ranks
from shipped_jobs import ship_vae_call
from tiny_vae import FLUX, random_latent, random_vae
from vae_halves import Half


class Steps:
    """The boundary of a request that is not cancelled."""

    def __call__(self, step, latent):
        pass

    def is_cancelled(self):
        return False

    def finish(self):
        pass


def modules_of(world):
    return Modules(Layouts(world), JobReader(world), lambda source: import_comfyui(source, world.device))


def load(modules, half):
    message = Load(None, ParallelStrategy(), half.number, (), comfyui=import_comfyui_here())
    return modules.load(message, half.module_payload())


def call(modules, held, latent):
    answer, record = modules.run(held, ship_vae_call(latent), Steps())
    return None if answer is None else unpack_tree(answer), record


def _decode_again_and_again(world):
    """Returns this rank's open descriptors after each decode with a newly sent VAE. The latent leaves one rank without
    rows."""
    modules, half, counts = modules_of(world), Half(random_vae(FLUX), 16, 2), []
    for _ in range(5):
        call(modules, load(modules, half), random_latent(FLUX, 2, 3))
        counts.append(len(list(Path("/proc/self/fd").iterdir())))
    return counts


def test_a_vae_that_is_sent_again_takes_over_the_groups_of_the_one_before():
    import_comfyui_here()
    for counts in run_ranks(_decode_again_and_again, 3):
        assert len(set(counts[1:])) == 1, counts


def _call_where_one_rank_cannot(world):
    """Returns (this rank's refusal of a call, computed parts of the next call, shape of its image or None)."""
    modules, half, latent = modules_of(world), Half(random_vae(FLUX), 16, 2), random_latent(FLUX, 2, 2)
    held = load(modules, half)
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 1:
            patch.setattr(held._network, "check", lambda: (_ for _ in ()).throw(RequestError("no room here")))
        else:
            patch.setattr(held._network, "check", lambda: None)
        with pytest.raises(Exception) as refused:
            call(modules, held, latent)
    image, record = call(modules, held, latent)
    return str(refused.value), record.parts, None if image is None else tuple(image.shape)


def test_a_vae_that_one_rank_alone_cannot_compute_is_computed_by_none():
    """If the ranks did not agree before they compute, the first would wait for the second."""
    import_comfyui_here()
    first, second = run_ranks(_call_where_one_rank_cannot, 2)
    assert first == ("another process could not run the job", 1, (1, 16, 16, 3))
    assert second[0].endswith("than the pack knows: no room here") and second[1:] == (1, None)


def _setting_in_a_call(world):
    """Returns what a setting of torch is in a call that was sent while it was on, and afterwards."""
    modules, matmul = modules_of(world), torch.backends.cuda.matmul
    held = load(modules, Half(random_vae(FLUX), 16, 2))
    with computing_with({"matmul.allow_fp16_accumulation": True}):
        sent = ship_vae_call(random_latent(FLUX, 2, 2))
    compute, found = held.call, []
    held.call = lambda *args: found.append(matmul.allow_fp16_accumulation) or compute(*args)
    modules.run(held, sent, Steps())
    return *found, matmul.allow_fp16_accumulation


def test_a_vae_computes_with_the_settings_of_the_process_that_calls_it():
    import_comfyui_here()
    assert run_ranks(_setting_in_a_call, 2) == [(True, False)] * 2
