"""Copies of the real ComfyUI with changed source text that stand for other versions of it, and empty ones."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from comfy_harness import require_comfyui

# Versions before 0.13 put the image before the text in HunyuanVideo.
IMAGE_BEFORE_TEXT = {
    "comfy/ldm/flux/layers.py": [
        ("torch.cat((txt_q, img_q), dim=2)", "torch.cat((img_q, txt_q), dim=2)"),
        ("torch.cat((txt_k, img_k), dim=2)", "torch.cat((img_k, txt_k), dim=2)"),
        ("torch.cat((txt_v, img_v), dim=2)", "torch.cat((img_v, txt_v), dim=2)"),
        (
            "txt_attn, img_attn = attn[:, : txt.shape[1]], attn[:, txt.shape[1]:]",
            "img_attn, txt_attn = attn[:, : img.shape[1]], attn[:, img.shape[1]:]",
        ),
    ],
    "comfy/ldm/hunyuan_video/model.py": [
        ("ids = torch.cat((txt_ids, img_ids), dim=1)", "ids = torch.cat((img_ids, txt_ids), dim=1)"),
        ("attn_mask[:, 0, :txt.shape[1]] = txt_mask", "attn_mask[:, 0, img_len:] = txt_mask"),
        ("img = torch.cat((txt, img), 1)", "img = torch.cat((img, txt), 1)"),
        ("img = img[:, txt.shape[1]: img_len + txt.shape[1]]", "img = img[:, :img_len]"),
    ],
}


def make_comfyui(folder: Path, version: str = "0.30.0") -> Path:
    """Makes the files in `folder` by which a ComfyUI of that version is recognised."""
    (folder / "comfy").mkdir(parents=True)
    (folder / "main.py").touch()
    (folder / "comfy" / "samplers.py").touch()
    (folder / "comfyui_version.py").write_text(f'__version__ = "{version}"\n')
    return folder


def copy_of_comfyui(folder: Path, changes: Mapping[str, Sequence[tuple[str, str]]]) -> Path:
    """Makes a copy of ComfyUI in `folder` with text replaced: by file, (old, new) pairs. Skips the test if a file does
    not have the old text."""
    real = require_comfyui()
    folder.mkdir()
    for entry in real.iterdir():
        if entry.name == "comfy":
            # Compiled files are copied with it; Python ignores those of a changed source.
            shutil.copytree(entry, folder / entry.name, copy_function=_copied)
        elif entry.is_dir():
            (folder / entry.name).symlink_to(entry)
        else:
            _copied(entry, folder / entry.name)
    for name, replacements in changes.items():
        text = (real / name).read_text()
        for old, new in replacements:
            if old not in text:
                pytest.skip(f"this ComfyUI's {name} has no {old!r}")
            text = text.replace(old, new)
        (folder / name).write_text(text)
    return folder


def _copied(source: str | Path, target: str | Path) -> None:
    """Copies code and links data: a module's path must be in the copy, and a link would lead out of it."""
    if Path(source).suffix in (".py", ".pyc"):
        shutil.copy2(source, target)
    else:
        Path(target).symlink_to(source)
