"""Each ComfyUI node that changes a model, a prompt or sampling gives on ours the latent that it gives on stock.

The list comes from ComfyUI's own registry, so a new node is tested at once.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from any_runs import TOLERANCE
from comfy_harness import ROOT
from comfyui_client import PromptFailed
from graphs import OURS, STOCK, Graph, inputs_of

SUBJECTS = {"MODEL", "CONDITIONING", "GUIDER", "SAMPLER", "SIGMAS", "NOISE"}
# Types that no graph here can provide: files of other kinds of models, sound and video, LoRAs (test_lora.py) and
# ControlNets (test_extras.py). A new type must be added here or to Wires.
BEYOND = {
    "AUDIO", "AUDIO_ENCODER_OUTPUT", "BOUNDING_BOX", "CAMERA_CONTROL", "CLIP", "CLIP_VISION", "COMFY_AUTOGROW_V3",
    "COMFY_DYNAMICCOMBO_V3", "COMFY_MATCHTYPE_V3", "CONTROL_NET", "GLIGEN", "HOOKS", "HOOK_KEYFRAMES",
    "IC_LORA_PARAMETERS", "LORA_MODEL", "MESH", "MODEL_PATCH", "PARALLEL_MODEL", "PARALLEL_STRATEGY", "PHOTOMAKER",
    "TRACKS", "UPSCALE_MODEL", "VOXEL", "WAN_CAMERA_EMBEDDING",
}  # fmt: skip
# Inputs of nodes whose defaults change nothing, or whose first choice tests little.
TELLING = {
    "StyleModelApply": {"strength_type": "attn_bias", "strength": 0.5},
    "ScaleROPE": {"scale_x": 2.0, "scale_y": 0.5, "shift_t": 1.0, "shift_x": -3.0},
    "ManualSigmas": {"sigmas": "1.0, 0.6, 0.2, 0.0"},
    "ContextWindowsManual": {"dim": 2, "context_length": 8},
    "ModelComputeDtype": {"dtype": "fp32"},
    "SD_4XUpscale_Conditioning": {"scale_ratio": 0.5},  # otherwise 1088 x 816 pixels
}
# Optional inputs that stay empty: WanSoundImageToVideo encodes ref_motion as 73 frames, and control_video only fits a
# video VAE. Its own model, which reads them, is in test_model_families.py.
EMPTY = {"WanSoundImageToVideo": {"control_video", "ref_motion"}}
ELSEWHERE = {"TorchCompileModel"}  # slow; in test_compile_and_kernels.py
TOGETHER = 8  # nodes in one prompt
SAMPLING = {"steps": 2, "cfg": 2.0}
SMALL = {"steps": 3, "width": 128, "height": 96, "batch_size": 1, "length": 1}


class Wires(Graph):
    """A graph that can provide a node's inputs."""

    def __init__(self, model: list) -> None:
        super().__init__()
        self.base = model
        self.draws = itertools.count(10)
        self.makers = {
            "MODEL": lambda: self.base,
            "CONDITIONING": lambda: self.text(next(self.draws)),
            "LATENT": lambda: self.latent(draw=4),
            "MASK": lambda: [self.add("SolidMask", value=0.6, width=128, height=96), 0],
            "IMAGE": lambda: [self.add("EmptyImage", width=128, height=96, batch_size=1, color=9000), 0],
            "NOISE": lambda: [self.add("RandomNoise", noise_seed=3), 0],
            "SAMPLER": lambda: [self.add("KSamplerSelect", sampler_name="euler"), 0],
            "SIGMAS": lambda: [
                self.add("BasicScheduler", model=self.base, scheduler="simple", steps=3, denoise=1.0), 0
            ],
            "LATENT_OPERATION": lambda: [self.add("LatentOperationSharpen", sharpen_radius=3, sigma=1.0, alpha=0.1), 0],
            "TIMESTEPS_RANGE": lambda: [
                self.add("ConditioningTimestepsRange", start_percent=0.0, end_percent=0.6), 0
            ],
            "VAE": lambda: [self.add("TestTinyVAE"), 0],
            "STYLE_MODEL": lambda: [self.add("TestStyle"), 0],
            "CLIP_VISION_OUTPUT": lambda: [self.add("TestStyle"), 1],
        }  # fmt: skip


def _number(kind: str, options: dict):
    """Returns a FLOAT near the default, which itself may change nothing; an INT keeps its default."""
    default = options.get("default", 0)
    if kind == "INT":
        return max(default, options.get("min", 0))
    other = default + 0.25
    return other if other <= options.get("max", other) else default - 0.25


def place(graph: Wires, name: str, info: dict) -> str | None:
    """Adds the node with its inputs and returns its id, or None if the graph cannot provide one of them."""
    values = {}
    for field, kind, options, required in inputs_of(info):
        if field in EMPTY.get(name, ()):
            continue
        kinds = kind.split(",")
        known = next((one for one in kinds if one in graph.makers), None)
        if known is not None:
            values[field] = graph.makers[known]()
        elif kind in ("INT", "FLOAT"):
            wanted = SMALL[field] if field in SMALL else _number(kind, options)
            values[field] = min(max(wanted, options.get("min", wanted)), options.get("max", wanted))
        elif kind in ("STRING", "BOOLEAN"):
            values[field] = options.get("default", "" if kind == "STRING" else False)
        elif kind == "COMBO":
            if not options.get("options"):
                return None  # a list of files, which is empty here
            values[field] = options.get("default", options["options"][0])
        elif required:
            assert set(kinds) <= BEYOND, f"{name} asks for {kind}: teach this test what that is"
            return None
    return graph.add(name, **{**values, **TELLING.get(name, {})})


def sampled(graph: Wires, info: dict, node: str, kind: str) -> list:
    """Returns the latent that the node's output changes. Of ours, Parallel Sampler takes prompts."""
    outputs = info["output"]
    subject = next(kind for kind in outputs if kind in SUBJECTS)
    made = [node, outputs.index(subject)]
    latent = [node, outputs.index("LATENT")] if "LATENT" in outputs else graph.latent(draw=5)
    if subject in ("MODEL", "CONDITIONING"):
        model, positive = (made, graph.text(91)) if subject == "MODEL" else (graph.base, made)
        request = (positive, graph.text(92), latent)
        if kind == OURS and subject == "CONDITIONING":
            return graph.parallel_sampler(graph.base[0], *request, **SAMPLING)
        return graph.ksampler(model, *request, **SAMPLING)
    parts = {kind: graph.makers[kind]() for kind in ("NOISE", "SAMPLER", "SIGMAS")}
    guider = graph.add("BasicGuider", model=graph.base, conditioning=graph.text(91))
    parts |= {"GUIDER": [guider, 0], subject: made}
    wired = {kind.lower(): source for kind, source in parts.items()}
    return [graph.add("SamplerCustomAdvanced", latent_image=latent, **wired), 0]


def run(comfy, nodes: dict[str, dict], unet: str, kind: str) -> tuple[dict, dict]:
    """Computes with each node on a model of this kind, all in one prompt. Returns ({node: its latent}, {node: its
    failure}). The prompt runs again without a node that failed; ComfyUI keeps what others gave."""
    graph, owners, failures = Wires([]), {}, {}
    graph.base = graph.model(kind, unet, "cpu:2")
    for name, info in nodes.items():
        before = set(graph.prompt)
        graph.draws = itertools.count(10)
        graph.save(sampled(graph, info, place(graph, name, info), kind), f"{name} {kind}.safetensors")
        owners |= {node: name for node in graph.prompt if node not in before}
    while owners:
        try:
            comfy.run(graph.prompt, timeout=300)
            break
        except PromptFailed as failure:
            name = owners[failure.node_id]
            failures[name] = failure
            for node in [node for node, owner in owners.items() if owner == name]:
                del graph.prompt[node], owners[node]
    found = {name: comfy.tensor(f"{name} {kind}.safetensors") for name in nodes if name not in failures}
    return found, failures


def verdicts(comfy, nodes: dict[str, dict], unet: str) -> dict[str, str]:
    """Returns for each node "same", "not Flux.1's" (stock cannot do it), or what is wrong."""
    stock, unable = run(comfy, nodes, unet, STOCK)
    ours, failures = run(comfy, {name: nodes[name] for name in stock}, unet, OURS)
    outcomes = dict.fromkeys(unable, "not Flux.1's")
    outcomes |= {name: deviation(stock[name], latent) or "same" for name, latent in ours.items()}
    outcomes |= {
        name: f"{failure.exception_type}: {failure.exception_message}" for name, failure in failures.items()
    }
    return outcomes


def deviation(stock: torch.Tensor, ours: torch.Tensor) -> str:
    """Returns what is wrong with our latent, "" if nothing is."""
    if stock.shape != ours.shape:
        return f"{list(ours.shape)} instead of {list(stock.shape)}"
    if torch.equal(stock.isnan(), ours.isnan()):  # at sigma 0 some nodes divide by zero
        stock, ours = stock.nan_to_num(), ours.nan_to_num()
    difference = (ours - stock).abs().max().item()
    return "" if difference <= TOLERANCE * stock.abs().max() else f"off by {difference:.1e}"


def documented() -> set[str]:
    """Returns the nodes that docs/compatibility.md calls exact."""
    lines = (ROOT / "docs" / "compatibility.md").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("**Exact:** "))
    return set(line.removeprefix("**Exact:** ").rstrip(".").split(", "))


@pytest.mark.timeout(600)
def test_every_node_of_the_registry_gives_the_stock_latent(comfy, subtests):
    unet = comfy.write_flux("tiny_dev.safetensors")
    registry = comfy.client.object_info()
    tested, found = {}, {}
    for name, info in sorted(registry.items()):
        ours_or_a_test = "custom_nodes" in info["python_module"]
        if ours_or_a_test or name in ELSEWHERE or info.get("api_node") or not SUBJECTS & set(info["output"]):
            continue
        if not SUBJECTS & {kind for _, kind, _, _ in inputs_of(info)} and "MODEL" in info["output"]:
            continue  # a loader of files
        if place(Wires(["nothing", 0]), name, info) is None:
            found.setdefault("beyond", []).append(name)
        else:
            tested[name] = info
    names = list(tested)
    for first in range(0, len(names), TOGETHER):
        together = {name: tested[name] for name in names[first : first + TOGETHER]}
        outcomes = verdicts(comfy, together, unet)
        assert outcomes.keys() == together.keys()
        for name, outcome in outcomes.items():
            found.setdefault(outcome, []).append(name)
            with subtests.test(node=name):
                assert outcome in ("same", "not Flux.1's")
    for outcome, names in found.items():
        print(f"{outcome}: {', '.join(names)}")
    assert len(found["same"]) >= 100
    assert (documented() & set(registry)) - ELSEWHERE <= set(found["same"])
