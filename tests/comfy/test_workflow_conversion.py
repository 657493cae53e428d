"""With the real ComfyUI's node list, a saved editor workflow becomes the prompt that a person would write."""

from __future__ import annotations

import pytest

from workflow_to_api import WorkflowError, workflow_to_api


def saved_workflow(unet: str) -> dict:
    """Returns UNETLoader and KSampler as the editor saves them: unnamed values, and a control value after the seed."""
    text = {"type": "TestConditioning", "inputs": []}
    sockets = [("model", "MODEL", 1), ("positive", "CONDITIONING", 2), ("negative", "CONDITIONING", 3)]
    sockets.append(("latent_image", "LATENT", 4))
    return {
        "nodes": [
            {"id": 1, "type": "UNETLoader", "inputs": [], "widgets_values": [unet, "default"]},
            {"id": 2, **text, "widgets_values": [1, 7, 64, 32, 1, 3.5]},
            {"id": 3, **text, "widgets_values": [2, 7, 64, 32, 1, 3.5]},
            {"id": 4, "type": "TestLatent", "inputs": [], "widgets_values": [8, 8, 1, -1, "", False]},
            {
                "id": 5,
                "type": "KSampler",
                "inputs": [{"name": name, "type": kind, "link": link} for name, kind, link in sockets],
                "widgets_values": [7, "randomize", 2, 2.0, "euler", "simple", 1.0],
            },
        ],
        "links": [
            [1, 1, 0, 5, 0, "MODEL"],
            [2, 2, 0, 5, 1, "CONDITIONING"],
            [3, 3, 0, 5, 2, "CONDITIONING"],
            [4, 4, 0, 5, 3, "LATENT"],
        ],
    }


def expected_prompt(unet: str) -> dict:
    text = {"tokens": 7, "width": 64, "pooled_width": 32, "batch": 1, "guidance": 3.5}
    latent = {"width": 8, "height": 8, "batch": 1, "draw": -1, "batch_index": "", "noise_mask": False}
    latent |= {"channels": 16, "frames": 0}  # missing from the workflow, so the defaults
    links = {"model": ["1", 0], "positive": ["2", 0], "negative": ["3", 0], "latent_image": ["4", 0]}
    sampling = {
        "seed": 7,
        "steps": 2,
        "cfg": 2.0,
        "sampler_name": "euler",
        "scheduler": "simple",
        "denoise": 1.0,
    }
    return {
        "1": {"class_type": "UNETLoader", "inputs": {"unet_name": unet, "weight_dtype": "default"}},
        "2": {"class_type": "TestConditioning", "inputs": {"draw": 1, **text}},
        "3": {"class_type": "TestConditioning", "inputs": {"draw": 2, **text}},
        "4": {"class_type": "TestLatent", "inputs": latent},
        "5": {"class_type": "KSampler", "inputs": {**links, **sampling}},
    }


def test_a_saved_workflow_becomes_a_prompt_that_runs(comfy):
    unet = comfy.write_flux("tiny_dev.safetensors")
    prompt = workflow_to_api(saved_workflow(unet), comfy.registry)
    without_titles = {
        key: {"class_type": n["class_type"], "inputs": n["inputs"]} for key, n in prompt.items()
    }
    assert without_titles == expected_prompt(unet)
    assert comfy.sample(prompt, ["5", 0]).isfinite().all()


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
