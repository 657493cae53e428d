"""The MODEL's patcher: what happens when a sampler begins and ends."""

from types import SimpleNamespace

import torch

from comfy_modules import CPU, import_comfyui_here
from pack_nodes import import_node_module
from parallel_backend.sidecar import pool


def patcher_of(network):
    import_comfyui_here()
    model = torch.nn.Module()
    object.__setattr__(model, "diffusion_model", network)
    return import_node_module("nodes.model.patcher").StepwisePatcher(model, CPU, CPU)


def test_when_a_sampler_ends_ranks_give_back_what_they_kept_for_its_next_call(monkeypatch):
    """Before ComfyUI decodes: of what still looks taken it would move the ranks' weights away."""
    done = []
    network = SimpleNamespace(
        spec="a model",
        record=None,
        run_file=SimpleNamespace(end=lambda: ()),
        end_run=lambda: done.append("ended"),
    )
    monkeypatch.setattr(pool, "release_cache", done.append)
    patcher_of(network).cleanup()
    assert done == ["ended", "a model"]


def test_each_call_of_a_run_asks_for_the_file_that_it_began_with_and_its_record_tells_of_a_change(
    tmp_path, monkeypatch
):
    import_comfyui_here()
    module = import_node_module("nodes.model.module_network")
    path, asked = tmp_path / "a.safetensors", []
    path.write_text("weights")
    run_file = import_node_module("nodes.model.run_file").RunFile(str(path))
    monkeypatch.setattr(pool, "release_cache", lambda spec: None)

    def run(options, shape, text, on_ranks, **more):
        sidecar = SimpleNamespace(call=lambda *args, **kwargs: asked.append(kwargs["file"]))
        on_ranks(sidecar, None)
        return "answer", None, None

    network = SimpleNamespace(
        spec="a model",
        record=None,
        reuse=None,
        run_file=run_file,
        end_run=lambda: None,
        plans=SimpleNamespace(run=run),
    )
    call = SimpleNamespace(kwargs={}, method="forward")
    run_file.begin()
    first = run_file.identity
    module.RemoteModule._on_ranks(network, call, (1, 4, 2, 2), 0, {})
    (tmp_path / "new").write_text("others!")
    (tmp_path / "new").replace(path)
    module.RemoteModule._on_ranks(network, call, (1, 4, 2, 2), 0, {})
    assert asked == [first, first] and first is not None
    network.record = SimpleNamespace(notes=[])
    patcher_of(network).cleanup()
    assert [note.partition(";")[0] for note in network.record.notes] == [
        "a.safetensors was replaced by another file while the job ran"
    ]
    run_file.begin()
    assert run_file.identity != first and run_file.end() == ()
