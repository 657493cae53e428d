"""Checks of the weights in memory: fp8, offload, sleep, and a text encoder in the same memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial

from ...models.dtypes import FP8
from ...strategy import ParallelStrategy
from ...wire.checks.findings import Finding
from ..doctor.parity import largest_difference
from .ranks import Ranks, compared, gigabytes, same_bits, steps_in_words

# Largest relative difference: weights rounded to 8 bits give a similar, not an equal picture. The demo model gives 0.1.
_FP8_LIMIT = 0.5


def check_fp8(ranks: Ranks) -> Iterator[Finding]:
    if FP8 in ranks.file.dtype:
        yield Finding("fp8", "skipped", "the file is in fp8, as everything here was")
        return
    expected = ranks.expected()
    result = ranks.sample(dtype=FP8)
    found = largest_difference(result.latent, expected.latent)
    load = result.info.load
    held = "" if load is None or not load.device_bytes else f", {gigabytes(load.device_bytes)} on the device"
    words = f"{steps_in_words(result)}{held}, largest difference {found:.1e} of the largest value"
    if found <= _FP8_LIMIT:
        yield Finding("fp8", "ok", words)
    else:
        remedy = "use weight_dtype auto, and report it with this text"
        yield Finding("fp8", "broken", f"{words}: another picture", remedy)


def check_offload(ranks: Ranks) -> Iterator[Finding]:
    expected = ranks.expected()
    result = ranks.sample(ParallelStrategy(offload_weights=True))
    notes = "".join(f"; {note}" for note in result.info.notes)
    yield compared("offload", result, expected, f"{steps_in_words(result)}{notes}")


def check_sleep(ranks: Ranks) -> Iterator[Finding]:
    """Gives the weights' memory back in both ways; the picture after each must be the same."""
    expected = ranks.sample()
    sidecar = ranks.group(1)
    actions: dict[str, tuple[str, Callable[[], None]]] = {
        "give back": (
            "left to the file and host memory",
            partial(sidecar.give_back, ranks.spec, sidecar.devices[0]),
        ),
        "sleep": ("discarded", sidecar.sleep),
    }
    for name, (where, act) in actions.items():
        before, started = ranks.memory(1)[0].weight_bytes, time.perf_counter()
        act()
        seconds, freed = time.perf_counter() - started, before - ranks.memory(1)[0].weight_bytes
        words = f"weights {where} in {seconds:.2f} s, {gigabytes(freed)} freed"
        yield same_bits(name, ranks.sample(), expected, words)


def check_comfyui(ranks: Ranks) -> Iterator[Finding]:
    yield Finding(
        "text encoder and VAE",
        "skipped",
        "not run: it takes ComfyUI itself",
        "run a workflow of yours three times in ComfyUI, changing the prompt each time: the report of Parallel "
        "Sampler must say for the second and third that the model was loaded already",
    )
