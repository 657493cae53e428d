"""Writes locales/en/nodeDefs.json from the node definitions of a real ComfyUI, so that it agrees with the schemas."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from comfyui_client import ComfyUIClient
from comfyui_server import ComfyUIServer
from comfyui_source import find_comfyui
from steps import SetupError, exit_on_setup_error

ROOT = Path(__file__).resolve().parent.parent
CATEGORY = "parallel"  # nodes/links.py
ENGLISH = ROOT / "locales" / "en" / "nodeDefs.json"


def own_nodes(object_info: dict[str, Any]) -> dict[str, Any]:
    """Returns the definitions of this pack's nodes among all of ``/object_info``."""
    return {name: info for name, info in object_info.items() if info["category"] == CATEGORY}


def english(object_info: dict[str, Any]) -> dict[str, Any]:
    """Returns nodeDefs.json as ComfyUI's page reads it: name, description, inputs by name, outputs by position."""
    return {name: _texts(info) for name, info in own_nodes(object_info).items()}


def _texts(info: dict[str, Any]) -> dict[str, Any]:
    inputs = {}
    for group in ("required", "optional"):
        for name in info["input_order"].get(group, []):
            options = info["input"][group][name][1]
            inputs[name] = {"name": name, "tooltip": options["tooltip"]}
            if options.get("control_after_generate"):  # a widget that ComfyUI's page adds
                inputs["control_after_generate"] = {"name": "control after generate"}
    outputs = {
        str(place): {"name": name, "tooltip": tooltip}
        for place, (name, tooltip) in enumerate(
            zip(info["output_name"], info["output_tooltips"], strict=True)
        )
    }
    texts = {"display_name": info["display_name"], "description": info["description"]}
    return {**texts, "inputs": inputs, "outputs": outputs}


def main() -> None:
    """Starts a ComfyUI and writes the texts of its definitions. Raises SetupError if there is no ComfyUI."""
    comfyui = find_comfyui()
    if comfyui is None:
        raise SetupError("no ComfyUI found: run ./scripts/test once, or set COMFYUI_PATH")
    with tempfile.TemporaryDirectory() as folder:
        packs = {"comfyui-parallel-sampling": ROOT}
        with ComfyUIServer(comfyui, Path(folder), packs, cpu=True) as server:
            texts = english(ComfyUIClient(server.url).object_info())
    ENGLISH.write_text(json.dumps(texts, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"{len(texts)} nodes in {ENGLISH.relative_to(ROOT)}")


if __name__ == "__main__":
    exit_on_setup_error(main)
