"""Every example workflow loads into the real ComfyUI without a missing node and validates."""

from __future__ import annotations

import json

import pytest

from comfy_harness import ROOT
from comfyui_client import PromptRejected
from workflow_to_api import workflow_to_api

EXAMPLES = (
    "demo_no_downloads",
    "flux_dev_lora_parallel",
    "flux_dev_parallel",
    "flux_schnell_parallel",
    "stock_ksampler_parallel_model",
)

# Checkpoints that a test machine does not have: the one reason for which a valid example may be rejected here.
_FILE_INPUTS = {"unet_name", "vae_name", "clip_name", "clip_name1", "clip_name2", "ckpt_name", "lora_name"}


def _example_names():
    return sorted(path.stem for path in (ROOT / "example_workflows").glob("*.json"))


def test_no_example_is_missing_or_untested():
    assert _example_names() == sorted(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_loads_and_validates(comfy, name):
    folder = ROOT / "example_workflows"
    workflow = json.loads((folder / f"{name}.json").read_text())
    assert (folder / f"{name}.jpg").read_bytes().startswith(b"\xff\xd8\xff"), (
        "the thumbnail beside it is a JPEG"
    )
    prompt = workflow_to_api(workflow, comfy.client.object_info())
    try:
        prompt_id = comfy.client.queue(prompt)
    except PromptRejected as rejected:
        for report in rejected.node_errors.values():
            for error in report["errors"]:
                assert error["type"] == "value_not_in_list", error
                assert error["extra_info"]["input_name"] in _FILE_INPUTS, error
    else:
        outputs = comfy.client.wait(prompt_id, timeout=240)["outputs"]
        assert any("images" in output for output in outputs.values())
