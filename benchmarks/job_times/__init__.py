"""A node for benchmarks/overhead.py that times repeated runs of a job in ComfyUI's process."""

from __future__ import annotations

import json
import sys
import time
from itertools import pairwise
from pathlib import Path

import comfy.sample
import folder_paths
import torch

RECORD = "parallel_record"  # the key of a MODEL's options under which the pack records the times of a run


class BenchJob:
    """Samples `runs` times after three warm-up runs. Writes the seconds of each run and of its steps. The steps of a
    stock model are timed from one step's end to the next."""

    CATEGORY, FUNCTION, RETURN_TYPES, OUTPUT_NODE = "parallel/benchmarks", "run", (), True

    @classmethod
    def INPUT_TYPES(cls) -> dict:
        texts = {"positive": ("CONDITIONING",), "negative": ("CONDITIONING",)}
        numbers = {"steps": ("INT", {}), "cfg": ("FLOAT", {}), "runs": ("INT", {})}
        return {
            "required": {
                "model": ("MODEL",),
                **texts,
                "latent": ("LATENT",),
                **numbers,
                "path": ("STRING", {}),
            }
        }

    def run(self, model, positive, negative, latent, steps, cfg, runs, path):
        samples = comfy.sample.fix_empty_latent_channels(model, latent["samples"])
        noise = torch.randn(samples.shape, generator=torch.Generator().manual_seed(3))
        found = []
        for number in range(runs + 3):
            with torch.inference_mode():
                one = _timed(model, noise, steps, cfg, positive, negative, samples)
            if number >= 3:
                found.append(one)
        (Path(folder_paths.get_output_directory()) / path).write_text(json.dumps(found))
        return ()


def _timed(model, noise, steps, cfg, positive, negative, samples) -> dict:
    model = model.clone()
    record = _record()
    if type(model).__name__ == "JobPatcher":
        model.model_options["transformer_options"][RECORD] = record
    ends: list[float] = []
    request = (noise, steps, cfg, "euler", "simple", positive, negative, samples)
    begun = time.perf_counter()
    comfy.sample.sample(model, *request, callback=lambda *_: ends.append(time.perf_counter()), seed=3)
    seconds = time.perf_counter() - begun
    if record.runs:
        return {"seconds": seconds, "steps": list(record.runs[-1].step_seconds)}
    return {"seconds": seconds, "steps": [after - before for before, after in pairwise(ends)]}


def _record():
    name = next(name for name in sys.modules if name.endswith(".nodes.host.calls"))
    return sys.modules[name].RunRecord()


NODE_CLASS_MAPPINGS = {"BenchJob": BenchJob}
