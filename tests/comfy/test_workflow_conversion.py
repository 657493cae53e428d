"""With the real ComfyUI's node list, saved values of a choice with inputs of its own get the right names.

tests/scripts/test_workflow_to_api.py tests the rest, and test_example_workflows.py converts and runs whole workflows.
"""

from __future__ import annotations

import pytest

from workflow_to_api import WorkflowError, workflow_to_api


def saved_video(codec: str, *more) -> dict:
    values = ["video/clip", "auto", codec, *more]
    return {"nodes": [{"id": 1, "type": "SaveVideo", "inputs": [], "widgets_values": values}], "links": []}


def test_a_choice_brings_its_own_inputs_by_dotted_names(comfy):
    """Since ComfyUI 0.33 the names are one level deeper, because the container's choice contains the codec."""
    registry = comfy.registry
    codec = "codec" if "codec" in registry["SaveVideo"]["input"]["required"] else "format.codec"
    plain = workflow_to_api(saved_video("auto"), registry)["1"]["inputs"]
    assert plain == {"filename_prefix": "video/clip", "format": "auto", codec: "auto"}
    chosen = workflow_to_api(saved_video("h264", "re-encode", 20.0), registry)["1"]["inputs"]
    named = {codec: "h264", f"{codec}.encoding": "re-encode", f"{codec}.encoding.crf": 20.0}
    assert chosen.items() >= named.items()
    older = workflow_to_api(saved_video("h264"), registry)["1"]["inputs"]
    assert older[f"{codec}.encoding"] == "auto"


def test_saved_values_that_fit_no_input_are_named(comfy):
    with pytest.raises(WorkflowError, match=r"saved values that fit no input: .*24"):
        workflow_to_api(saved_video("auto", 23, 24), comfy.registry)


def test_a_socket_of_several_types_is_the_widget_that_it_names(comfy):
    node = {"id": 1, "type": "LTXVEmptyLatentAudio", "inputs": [], "widgets_values": [121, 24.0, 1]}
    prompt = workflow_to_api({"nodes": [node], "links": []}, comfy.registry)
    assert prompt["1"]["inputs"] == {"frames_number": 121, "frame_rate": 24.0, "batch_size": 1}
