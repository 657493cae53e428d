#!/usr/bin/env python3
"""Says for each graph of ComfyUI's template library whether it runs with Parallel Model behind its loaders, and how.

python scripts/check_templates.py FOLDER [--json] [--write]

FOLDER holds the graphs: `templates` in the package comfyui-workflow-templates-json. A graph is judged without running
it: by the module class of each model (docs/models.md) and by the nodes between loader and sampler
(docs/compatibility.md). The last line with --json is {"graphs", "known", "run", "not": {graph: reason}}; known counts
the graphs without models and nodes that only a newer ComfyUI has. --write writes the page docs/templates.md.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from parallel_backend.models.tokens.table import state_of
from parallel_backend.requests import ATTENTION, BANDS, BLOCK, ROWS, STAY, TOKEN_MODES

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "templates.md"
LOADERS = {"UNETLoader", "CheckpointLoaderSimple", "ImageOnlyCheckpointLoader"}
_BYPASSED = {2, 4}  # a node's mode: muted, bypassed
_FILE = re.compile(r"\.(safetensors|sft|ckpt|gguf)$")

# A pattern for the name of a file in the library -> the class that ComfyUI detects in the file. The first match counts.
_CLASSES = (
    (
        r"ltx-2\.5|qwen_image_2\.1|flux3|wan_animate_2|moss_|yue2|ming_image|fibo2|pixal3d|trellis|minimax_music",
        "",
    ),
    (r"flux-2|flux2|flux1|flux\.1|longcat|ovis_image", "Flux"),
    (r"chroma-radiance", "ChromaRadiance"),
    (r"chroma", "Chroma"),
    (r"qwen_image|firered", "QwenImageTransformer2DModel"),
    (r"z_image|netayume|newbie", "NextDiT"),
    (r"minimax_h3|fasth3", "MiniMaxH3Model"),
    (r"ltx-2", "LTXAVModel"),
    (r"ltx-video", "LTXVModel"),
    (r"vace", "VaceWanModel"),
    (r"fun_camera", "CameraWanModel"),
    (r"scail_2", "SCAIL2WanModel"),
    (r"dancer", "WanDancerModel"),
    (r"s2v", "WanModel_S2V"),
    (r"humo", "HumoWanModel"),
    (r"causal_forcing", "CausalWanModel"),
    (r"wan_?2|wan21|chrono_edit", "WanModel"),
    (r"hunyuanvideo|hunyuan_video|capybara", "HunyuanVideo"),
    (r"hunyuan_3d_v2\.1", "HunYuanDiTPlain"),
    (r"hunyuan3d", "Hunyuan3Dv2"),
    (r"triposplat", "LatentSeqMMFlowModel"),
    (r"hidream_o1", "HiDreamO1Transformer"),
    (r"hidream", "HiDreamImageTransformer2DModel"),
    (r"anima", "Anima"),
    (r"mage_flow", "MageFlowTransformer2DModel"),
    (r"sd3\.5", "OpenAISignatureMMDITWrapper"),
    (r"kandinsky5", "Kandinsky5"),
    (r"krea2", "SingleStreamDiT"),
    (r"boogu", "BooguTransformer2DModel"),
    (r"omnigen2", "OmniGen2Transformer2DModel"),
    (r"ideogram4", "Ideogram4Transformer2DModel"),
    (r"joyai", "JoyImageTransformer3DModel"),
    (r"lens", "LensTransformer2DModel"),
    (r"ernie", "ErnieImageModel"),
    (r"pixeldit", "PixDiT_T2I"),
    (r"pid_", "PidNet"),
    (r"void_pass", "CogVideoXTransformer3DModel"),
    (r"ace_?step_?(v)?1\.5|ace_step_1\.5", "AceStepConditionGenerationModel"),
    (r"ace_step_v1_", "ACEStepTransformer2DModel"),
    (r"stable.audio", "AudioDiffusionTransformer"),
    (r"seedvr2", "NaDiT"),
    (r"sd_xl|svd|lotus|sdpose|v1-5|dreamshaper", "UNetModel"),
    (r"sam3|rt_detr", "no sampling"),
)
# The best token mode of calls with the patches of a node.
_WITH_PATCHES = {
    **dict.fromkeys(("AnimaLLLiteApply", "FluxKVCache", "WanInfiniteTalkToVideo"), ATTENTION),
    **dict.fromkeys(("QwenImageDiffsynthControlnet", "ZImageFunControlnet", "USOStyleReference"), BLOCK),
    **dict.fromkeys(("SkipLayerGuidanceDiT", "SkipLayerGuidanceDiTSimple", "SkipLayerGuidanceSD3"), BLOCK),
}
# Nodes between a loader and a sampler that ComfyUI 0.30.0 does not have.
NEWER_NODES = {
    "BlockSparseAttention",
    "MiniMaxH3FunControlNetApply",
    "ModelAttentionBackend",
    "QwenImage21Cache",
    "WanAnimate2Cache",
}
# Nodes that pass a model on, in addition to those that docs/compatibility.md names.
_PASS = {
    "LoraLoader",
    "LoraLoaderModelOnly",
    "ComfySwitchNode",
    "Reroute",
    "LTXVReferenceAudio",
    "ModelNoiseScale",
}

_NEWER = "needs a newer ComfyUI than the pack was proven on"  # follows the name of the model or node

_PAGE = """# The template library

Written by `scripts/check_templates.py` from {package}: {graphs} graphs sample a local model.
**{newer}** of them use a model or a node that ComfyUI 0.30.0, on which the pack was proven, does not have. With
**Parallel Model** behind each loader **{run}** run: {share} of all, and {known_share} of the {known} that this ComfyUI
can run. In {stay} the tokens of an image, video or sound stay apart from the first block to the last, in {block} each
block gathers what it gives, in {bands} devices compute bands of an image's rows, and in {rows} whole images and prompts
or queries of attention are shared out ([models.md](models.md) says what that means). Judged by the class of each model
and by the nodes between loader and sampler ([compatibility.md](compatibility.md)), not by running them: the models
themselves are too large for the machines that tests run on. Counted in the same way, 213 of 213 graphs run of the
library that came with ComfyUI 0.30.0 (0.1.27), and 204 of 210 of 0.33.0's (0.1.50).

Thirty graphs of 17 kinds of model are really run, in ComfyUI 0.30.0 and 0.33.0, with tiny files in place of theirs:
made parallel by *Make this workflow parallel*, they give stock's latents on two processes
(`./scripts/test tests/comfy/test_official_graphs.py`, where a Chromium is installed).

| graph | why it does not |
| --- | --- |
{missed}
"""


@dataclass(frozen=True)
class Graph:
    """A graph. `models`: its loaders' files; `nodes`: types from loader to sampler; `samples`: True if it samples."""

    name: str
    models: tuple[str, ...]
    nodes: tuple[str, ...]
    samples: bool


def read_graph(path: Path) -> Graph | None:
    """Reads a graph; returns None if the file is no graph."""
    workflow = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(workflow, dict) or "nodes" not in workflow:
        return None
    subgraphs = {one["id"]: one for one in (workflow.get("definitions") or {}).get("subgraphs", ())}
    nodes = [node for part in (workflow, *subgraphs.values()) for node in part.get("nodes", ())]
    active = [node for node in nodes if node.get("mode") not in _BYPASSED and node["type"] not in subgraphs]
    loaders = [node for node in active if node["type"] in LOADERS]
    between = {node["type"] for node in active if _has(node, "inputs") and _has(node, "outputs")}
    ends = any(_has(node, "inputs") and not _has(node, "outputs") for node in active)
    models = {file for node in loaders for file in _files(node)}
    return Graph(path.stem, tuple(sorted(models)), tuple(sorted(between)), ends)


def _has(node: Mapping[str, Any], side: str) -> bool:
    return any(socket.get("type") == "MODEL" for socket in node.get(side) or ())


def _files(node: Mapping[str, Any]) -> Iterator[str]:
    values = node.get("widgets_values") or ()
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, str) and _FILE.search(value):
            yield re.split(r"[/\\]", value)[-1]


def class_of(file: str) -> str | None:
    """Returns the module class of a file of the library, "" if it needs a newer ComfyUI than the table knows, or None
    if no pattern matches."""
    return next((found for pattern, found in _CLASSES if re.search(pattern, file.lower())), None)


def exact_nodes() -> set[str]:
    """Returns the nodes that docs/compatibility.md calls exact behind Parallel Model; it refuses none of ComfyUI's."""
    page = (ROOT / "docs" / "compatibility.md").read_text()
    kinds = ("Exact", "Exact behind Parallel Model")
    lists = (re.search(rf"^\*\*{kind}:\*\* (.+)\.$", page, re.MULTILINE) for kind in kinds)
    return _PASS.union(*(found.group(1).split(", ") for found in lists if found))


def verdict(graph: Graph, exact: set[str]) -> tuple[str, str]:
    """Returns (the best token mode of its models that its nodes permit, ""), or ("", why it does not run)."""
    for file in graph.models:
        found = class_of(file)
        if found is None:
            return "", f"nothing is known of the model {file}"
        if found == "":
            return "", f"{file} {_NEWER}"
    for node in graph.nodes:
        if node in NEWER_NODES:
            return "", f"the node {node} {_NEWER}"
        if node not in exact:
            return "", f"the node {node} was not tried"
    states = [state_of(class_of(file) or "") for file in graph.models if class_of(file) != "no sampling"]
    patched = [_WITH_PATCHES[node] for node in graph.nodes if node in _WITH_PATCHES]
    return max(min(states, key=TOKEN_MODES.index), *patched, STAY, key=TOKEN_MODES.index), ""


def judge(folder: Path) -> dict[str, tuple[str, str]]:
    """Returns the verdict on each graph that samples a local model, by its name."""
    exact = exact_nodes()
    graphs = filter(None, map(read_graph, sorted(folder.rglob("*.json"))))
    return {
        graph.name: verdict(graph, exact)
        for graph in graphs
        if graph.samples and any(class_of(file) != "no sampling" for file in graph.models)
    }


def known_graphs(found: Mapping[str, tuple[str, str]]) -> int:
    """Returns how many graphs need only models and nodes of the ComfyUI that the pack was proven on."""
    return sum(not reason.endswith(_NEWER) for _, reason in found.values())


def page(found: Mapping[str, tuple[str, str]], package: str) -> str:
    states = Counter(state for state, _ in found.values() if state)
    run = states.total()
    rows = "\n".join(f"| {name} | {reason} |" for name, (_, reason) in found.items() if reason)
    return _PAGE.format(
        package=package,
        graphs=len(found),
        run=run,
        share=f"{run / len(found):.0%}",
        newer=len(found) - known_graphs(found),
        known=known_graphs(found),
        known_share=f"{run / known_graphs(found):.0%}",
        stay=states[STAY],
        block=states[BLOCK],
        bands=states[BANDS],
        rows=states[ROWS] + states[ATTENTION],
        missed=rows,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="of the graphs")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", metavar="PACKAGE", help="put docs/templates.md together, of this package")
    arguments = parser.parse_args()
    found = judge(arguments.folder)
    if not found:
        parser.error(f"no graph in {arguments.folder} samples a local model")
    if arguments.write:
        PAGE.write_text(page(found, arguments.write))
    missed = {name: reason for name, (_, reason) in found.items() if reason}
    if arguments.json:
        run = len(found) - len(missed)
        print(json.dumps({"graphs": len(found), "known": known_graphs(found), "run": run, "not": missed}))
        return
    for name, (state, reason) in found.items():
        print(f"{name}: {state or reason}")


if __name__ == "__main__":
    main()
