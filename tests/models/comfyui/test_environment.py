"""The import of the user's ComfyUI, in new processes because it cannot be undone, and the routing of its attention."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from comfy_harness import require_comfyui

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import json, sys
import torch
from parallel_backend.errors import RequestError
from parallel_backend.models.comfyui.environment import import_comfyui
from parallel_backend.requests import ComfyUISource

report = []
for root, flags in json.loads(sys.argv[1]):
    if "autotune" in flags:
        torch.cuda.is_available = torch.backends.cudnn.is_available = lambda: True
    try:
        import_comfyui(ComfyUISource(root, tuple(flags)), torch.device("cpu"))
    except RequestError as error:
        report.append(str(error))
        continue
    from comfy.cli_args import args
    from comfy.ldm.flux.math import optimized_attention
    import comfy
    import nodes

    report.append({
        "cpu": args.cpu, "bf16_unet": args.bf16_unet, "command line": sys.argv[0], "comfy": list(comfy.__path__),
        "nodes": nodes.__file__, "routed": hasattr(optimized_attention, "__wrapped__"), "last": sys.path[-1],
        "tunes": torch.backends.cudnn.benchmark,
        "imported": sorted({"server", "execution", "folder_paths"} & set(sys.modules)),
    })
print(json.dumps(report))
"""


def _imports(*attempts, path=ROOT):
    """Imports each (root, flags) in turn, in one new process. Returns a report or an error message for each."""
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(attempts)],
        cwd=path,
        env={"PYTHONPATH": f"{path}:{ROOT}", "PATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout.splitlines()[-1])


def test_the_users_comfyui_with_its_flags_and_nothing_else_of_that_name(tmp_path):
    """Packages named `comfy` and `nodes` come before it on sys.path, as the pack's own `nodes` does."""
    root = str(require_comfyui())
    for name in ("comfy", "nodes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    first, again, second, other_flags = _imports(
        [root, ["--bf16-unet"]],
        [root, ["--bf16-unet"]],
        [str(tmp_path), ["--bf16-unet"]],
        [root, []],
        path=tmp_path,
    )
    assert (
        first
        == again
        == {
            "cpu": True,
            "bf16_unet": True,
            "command line": "-c",
            "comfy": [str(Path(root).resolve() / "comfy")],
            "nodes": str(tmp_path / "nodes" / "__init__.py"),
            "routed": True,
            "last": str(Path(root).resolve()),
            "tunes": False,
            "imported": [],
        }
    )
    for refusal in (second, other_flags):
        assert "Restart ComfyUI" in refusal


def test_a_refused_import_leaves_room_for_another(tmp_path):
    require_comfyui()
    (tmp_path / "nodes.py").touch()
    (tmp_path / "sageattention.py").write_text("raise ImportError(name='sageattention')")
    no_comfyui, unknown_flag, no_kernel, no_comfyui_again, after = _imports(
        [str(tmp_path), []],
        [str(require_comfyui()), ["--no-such-flag"]],
        [str(require_comfyui()), ["--use-sage-attention"]],
        [str(tmp_path), []],
        [str(require_comfyui()), ["--fast", "autotune"]],
        path=tmp_path,
    )
    assert "is not ComfyUI's folder" in no_comfyui
    assert "--no-such-flag" in unknown_flag
    assert "--use-sage-attention" in no_kernel and "Install what is missing" in no_kernel
    assert no_comfyui_again == no_comfyui
    assert after["routed"]
    assert after["tunes"], "what ComfyUI's server tells cuDNN as it starts"


@pytest.mark.parametrize("name", ["optimized_attention", "optimized_attention_masked"])
def test_only_a_current_call_answers_for_attention(name):
    from comfy_modules import import_comfyui_here

    import_comfyui_here()
    import torch
    from comfy.ldm.modules import attention

    from parallel_backend.models.attention import attention_by

    q = torch.randn(1, 3, 8)
    stock = getattr(attention, name)(q, q, q, 2)

    def doubled(library, call):
        return 2 * library(call)

    def tripled(library, call):
        return 3 * library(call)

    with attention_by(doubled):
        with attention_by(tripled):
            assert torch.equal(getattr(attention, name)(q, q, q, 2), 3 * stock)
        assert torch.equal(getattr(attention, name)(q, q, q, 2), 2 * stock)
    with pytest.raises(ZeroDivisionError), attention_by(doubled):
        raise ZeroDivisionError
    assert torch.equal(getattr(attention, name)(q, q, q, 2), stock)


def test_a_chosen_kernel_stands_in_place_of_comfyuis_attention_and_of_no_packs():
    from comfy_modules import import_comfyui_here

    import_comfyui_here()
    import torch
    from comfy.ldm.modules import attention

    from parallel_backend.models.attention import attention_by, attention_kernel
    from parallel_backend.models.comfyui.attention_router import reroute

    q = torch.randn(1, 3, 8)
    stock = attention.optimized_attention(q, q, q, 2)
    packs = reroute("optimized_attention", lambda q, k, v, heads: -q)

    def doubled(library, call):
        return 2 * library(call)

    def tripled(library, call):
        return 3 * library(call)

    with attention_kernel(doubled):
        assert torch.equal(attention.optimized_attention(q, q, q, 2), 2 * stock)
        assert torch.equal(packs(q, q, q, 2), -q)
        with attention_by(tripled):
            assert torch.equal(attention.optimized_attention(q, q, q, 2), 6 * stock)
    assert torch.equal(attention.optimized_attention(q, q, q, 2), stock)


class _Container:
    """A container that gives its tensor once, like AttentionTensorContainer of ComfyUI 0.33."""

    def __init__(self, tensor):
        self.tensor = tensor

    def take(self):
        tensor, self.tensor = self.tensor, None
        assert tensor is not None, "taken twice"
        return tensor


def test_tensors_come_out_of_their_containers_where_ranks_answer_for_attention(monkeypatch):
    """Since ComfyUI 0.33, MiniMax-H3 passes tensors to attention in containers."""
    from comfy_modules import import_comfyui_here

    import_comfyui_here()
    import torch
    from comfy.ldm.modules import attention

    from parallel_backend.models.attention import attention_by
    from parallel_backend.models.comfyui import attention_router

    container = getattr(attention, "AttentionTensorContainer", _Container)
    monkeypatch.setattr(attention, "AttentionTensorContainer", container, raising=False)
    received = []
    for name in ("optimized_attention", "optimized_attention_masked"):
        monkeypatch.setattr(attention, name, lambda *tensors, heads: received.append(tensors))
    attention_router.install_router(torch.device("cpu"))

    def answers(library, call):
        return torch.stack([call.q, call.k, call.v]).sum() * call.heads

    def held():
        return [container(torch.ones(2)) for _ in range(3)]

    with attention_by(answers):
        assert attention.optimized_attention(*held(), heads=2) == 12
    assert received == []
    attention.optimized_attention(*held(), heads=2)
    (given,) = received
    assert all(isinstance(one, container) for one in given), "ComfyUI opens them itself"
