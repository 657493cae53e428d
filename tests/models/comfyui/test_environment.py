"""The import of the user's ComfyUI, in new processes because it cannot be undone, and the routing of its attention."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from comfy_harness import require_comfyui
from parallel_backend.models.attention import attention_by, attention_kernel
from parallel_backend.models.comfyui import attention_router

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


def _imports(path, *attempts):
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
    """Packages named `comfy` and `nodes` come before it on sys.path, as the pack's own `nodes` does. A refused import
    leaves room for another."""
    root = str(require_comfyui())
    for name in ("comfy", "nodes"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    (tmp_path / "sageattention.py").write_text("raise ImportError(name='sageattention')")
    flags = ["--bf16-unet", "--fast", "autotune"]
    no_comfyui, unknown_flag, no_kernel, no_comfyui_again, first, again, second, other_flags = _imports(
        tmp_path,
        [str(tmp_path), []],
        [root, ["--no-such-flag"]],
        [root, ["--use-sage-attention"]],
        [str(tmp_path), []],
        [root, flags],
        [root, flags],
        [str(tmp_path), flags],
        [root, []],
    )
    assert "is not ComfyUI's folder" in no_comfyui
    assert "--no-such-flag" in unknown_flag
    assert "--use-sage-attention" in no_kernel and "Install what is missing" in no_kernel
    assert no_comfyui_again == no_comfyui
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
            "tunes": True,  # what ComfyUI's server tells cuDNN as it starts
            "imported": [],
        }
    )
    for refusal in (second, other_flags):
        assert "Restart ComfyUI" in refusal


@pytest.fixture
def attention(comfyui_here):
    from comfy.ldm.modules import attention

    return attention


def test_cudnn_tunes_nothing_unless_a_flag_asks_for_it(comfyui_here):
    assert not torch.backends.cudnn.benchmark


def times(factor):
    """Returns a function that answers for attention with `factor` times the library's answer."""
    return lambda library, call: factor * library(call)


@pytest.mark.parametrize("name", ["optimized_attention", "optimized_attention_masked"])
def test_only_a_current_call_answers_for_attention(attention, name):
    q = torch.randn(1, 3, 8)
    stock = getattr(attention, name)(q, q, q, 2)
    with attention_by(times(2)):
        with attention_by(times(3)):
            assert torch.equal(getattr(attention, name)(q, q, q, 2), 3 * stock)
        assert torch.equal(getattr(attention, name)(q, q, q, 2), 2 * stock)
    with pytest.raises(ZeroDivisionError), attention_by(times(2)):
        raise ZeroDivisionError
    assert torch.equal(getattr(attention, name)(q, q, q, 2), stock)


def test_a_chosen_kernel_stands_in_place_of_comfyuis_attention_and_of_no_packs(attention):
    q = torch.randn(1, 3, 8)
    stock = attention.optimized_attention(q, q, q, 2)
    packs = attention_router.reroute("optimized_attention", lambda q, k, v, heads: -q)
    with attention_kernel(times(2)):
        assert torch.equal(attention.optimized_attention(q, q, q, 2), 2 * stock)
        assert torch.equal(packs(q, q, q, 2), -q)
        with attention_by(times(3)):
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


def test_tensors_come_out_of_their_containers_where_ranks_answer_for_attention(attention, monkeypatch):
    """Since ComfyUI 0.33, MiniMax-H3 passes tensors to attention in containers."""
    container = getattr(attention, "AttentionTensorContainer", _Container)
    monkeypatch.setattr(attention, "AttentionTensorContainer", container, raising=False)
    received = []
    for name in ("optimized_attention", "optimized_attention_masked"):
        monkeypatch.setattr(attention, name, lambda *tensors, heads: received.append(tensors))
    attention_router.install_router(torch.device("cpu"))

    def held():
        return [container(torch.ones(2)) for _ in range(3)]

    with attention_by(lambda library, call: torch.stack([call.q, call.k, call.v]).sum() * call.heads):
        assert attention.optimized_attention(*held(), heads=2) == 12
    assert received == []
    attention.optimized_attention(*held(), heads=2)
    (given,) = received
    assert all(isinstance(one, container) for one in given), "ComfyUI opens them itself"
