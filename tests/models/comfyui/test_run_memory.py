"""What a model keeps by itself from call to call does not outlive the call: the next one's references may be others."""

import torch
from torch import nn

from comfy_modules import import_comfyui_here
from parallel_backend.models.comfyui.run_memory import FRAMES, RunMemory
from parallel_backend.models.comfyui.tiny.cases import TinyModel
from parallel_backend.requests import ModuleCall


class Keeps(nn.Module):
    """As HiDream O1: what it made of references, by the place in memory of the first ones that it saw."""

    kept = None

    def clear_kv_cache(self):
        self.kept = None

    def forward(self, references):
        if self.kept is None:
            self.kept = references * 2
        return self.kept


def test_references_of_another_call_are_not_taken_for_those_before():
    import_comfyui_here()
    model = TinyModel(Keeps())
    for value in (1.0, 3.0):
        call = model.live(ModuleCall((torch.full((2,), value),), {}, 2))
        assert torch.equal(model.module(*call.args), torch.full((2,), 2 * value))


class Causal(nn.Linear):
    def init_kv_caches(self, rows, tokens, device, dtype):
        return [{"k": torch.zeros(rows, tokens, device=device, dtype=dtype), "end": 0} for _ in range(2)]

    def init_crossattn_caches(self, rows, device, dtype):
        return [{"is_init": False} for _ in range(2)]


def test_frames_before_are_kept_as_far_as_the_sampler_says():
    memory, network = RunMemory(), Causal(1, 1)
    run = {"kind": FRAMES, "number": 3, "call": 0, "ends": [0, 0], "start_frame": 0}
    run |= {"rows": 2, "tokens": 5, "dtype": "float32"}
    first = memory.enter(run, network)["ar_state"]
    first["kv_caches"][0]["k"][:, 0] = 7.0
    again = memory.enter(run | {"call": 1, "ends": [1, 1], "start_frame": 1}, network)["ar_state"]
    assert again["start_frame"] == 1 and [cache["end"] for cache in again["kv_caches"]] == [1, 1]
    assert again["kv_caches"][0]["k"][0, 0] == 7.0 and again["crossattn_caches"] is first["crossattn_caches"]
    fresh = memory.enter(run | {"number": 4}, network)["ar_state"]
    assert not fresh["kv_caches"][0]["k"].any(), "another run begins with empty ones"
