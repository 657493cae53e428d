"""The MODEL's patcher: what happens when a sampler ends."""

from types import SimpleNamespace

import torch

from comfy_modules import CPU, import_comfyui_here
from pack_nodes import import_node_module
from parallel_backend.sidecar import pool


def test_when_a_sampler_ends_ranks_give_back_what_they_kept_for_its_next_call(monkeypatch):
    """Before ComfyUI decodes: of what still looks taken it would move the ranks' weights away."""
    import_comfyui_here()
    done, model = [], torch.nn.Module()
    network = SimpleNamespace(spec="a model", end_run=lambda: done.append("ended"))
    object.__setattr__(model, "diffusion_model", network)
    monkeypatch.setattr(pool, "release_cache", done.append)
    import_node_module("nodes.model.patcher").StepwisePatcher(model, CPU, CPU).cleanup()
    assert done == ["ended", "a model"]
