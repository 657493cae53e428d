"""Pickles in any input of a prompt or in a model folder are refused, and none of their code runs."""

from __future__ import annotations

import base64
import json
import pickle
from pathlib import Path

import pytest

from comfyui_client import PromptFailed, PromptRejected
from graphs import Graph

OURS = ("StrategySelector", "ParallelFluxLoader", "ParallelModelLoader", "ParallelModel", "ParallelSampler")


class _Touches:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self):
        return (Path.touch, (self._path,))


def _prompts(unet: str) -> dict[str, dict]:
    """Returns {loader: a prompt that samples with it}."""
    found = {}
    for kind in ("ParallelFluxLoader", "ParallelModelLoader", "ParallelModel"):
        graph = Graph()
        model = graph.loaded_by(kind, unet, graph.strategy("cpu:2", ulysses=2))
        latent = graph.parallel_sampler(model, *graph.request(), steps=1)
        graph.save(latent, "hostile.safetensors")
        found[kind] = graph.prompt
    return found


def _ends(comfy, prompt: dict) -> str:
    """Runs a prompt and returns "rejected", "failed" or "done"."""
    try:
        comfy.run(prompt)
    except PromptRejected:
        return "rejected"
    except PromptFailed:
        return "failed"
    return "done"


def test_no_input_of_a_prompt_is_ever_unpickled(comfy, tmp_path):
    mark = tmp_path / "was unpickled"
    data = pickle.dumps(_Touches(mark))
    assert pickle.loads(data) is None and mark.exists()  # noqa: S301, the control
    mark.unlink()
    hostile = (
        base64.b64encode(data).decode(),
        {"py/reduce": [{"py/type": "pathlib.Path"}, str(mark)], "__class__": "Path"},
        [data.decode("latin-1")],
    )
    taken = {"rejected": 0, "failed": 0, "done": 0}
    for prompt in _prompts(comfy.write_flux("hostile.safetensors")).values():
        assert _ends(comfy, prompt) == "done"
        text = json.dumps(prompt)
        for name in (name for name, node in prompt.items() if node["class_type"] in OURS):
            for given in prompt[name]["inputs"]:
                for value in hostile:
                    changed = json.loads(text)
                    changed[name]["inputs"][given] = value
                    taken[_ends(comfy, changed)] += 1
                    assert not mark.exists(), (name, given)
    assert taken["rejected"] > 100
    assert taken["done"] == 0


@pytest.mark.parametrize("loader", ["ParallelFluxLoader", "ParallelModelLoader", "ParallelModel"])
def test_a_pickle_in_a_model_folder_is_refused_by_each_loader(comfy, tmp_path, loader):
    mark, path = tmp_path / "was unpickled", "pickle.safetensors"
    comfy.write_flux(path)  # makes a file of that name in the model folder
    (found,) = comfy.server.base_directory.rglob(path)
    found.write_bytes(pickle.dumps(_Touches(mark)))
    try:
        assert _ends(comfy, _prompts(path)[loader]) in ("rejected", "failed")
    finally:
        found.unlink()
    assert not mark.exists()
