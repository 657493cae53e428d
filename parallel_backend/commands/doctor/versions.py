"""Findings about the installed versions, from a table of versions that are known not to work and why."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ...wire.checks.findings import Finding

SHOWN = ("python", "torch", "diffusers", "xfuser", "safetensors", "numpy")
_INSTALL = "pip install -r requirements.txt, in ComfyUI's Python environment, from this pack's folder"


@dataclass(frozen=True)
class Bound:
    """A lower bound: `package` below version `least` (or missing, if `required`) gets `status` for the reason `why`."""

    package: str
    least: str
    status: str
    why: str
    remedy: str = _INSTALL
    required: bool = True


# The lower bounds of requirements.txt: each is the oldest version that has what the code needs.
BOUNDS = (
    Bound("python", "3.10", "broken", "the pack uses syntax of 3.10", "a ComfyUI with Python 3.10 or newer"),
    Bound(
        "torch",
        "2.6",
        "broken",
        "sealed payloads, gloo's all-to-all and its attention kernels are used as 2.6 has them",
        "install a newer torch the way ComfyUI's own instructions say for your GPU",
    ),
    Bound(
        "diffusers", "0.42", "broken", "the Flux transformer and its attention dispatch changed up to 0.42"
    ),
    Bound("safetensors", "0.4.2", "broken", "fp8 weights cannot be read"),
    Bound("numpy", "1.25", "broken", "torch's bridge to numpy needs it"),
    Bound(
        "xfuser",
        "0.7.0",
        "slow",
        "its sequence parallelism was adjusted for 0.7; without it only engine native is there, which is exact too",
        required=False,
    ),
)
# The versions that docs/ and the tests were made with. Newer ones probably work but are untested.
TESTED = {"torch": "2.13", "diffusers": "0.42", "xfuser": "0.7"}


def check_versions(installed: Mapping[str, str], gpus: int, torch_problem: str = "") -> Iterator[Finding]:
    """Yields a finding per package, and one per known-bad combination.

    `installed`: versions by name, "" if missing; `torch_problem`: why torch cannot be imported, or empty.
    """
    yield from (_check_bound(name, installed.get(name, "")) for name in SHOWN)
    torch = installed.get("torch", "")
    if torch and torch_problem:
        finding = f"torch {torch} is installed and cannot be imported: {torch_problem}"
        remedy = "install torch again the way ComfyUI's own instructions say for your GPU"
        yield Finding("torch import", "broken", finding, remedy)
    if gpus and "+cpu" in torch:
        seen = "1 GPU" if gpus == 1 else f"{gpus} GPUs"
        finding = f"torch {torch} is a build for the CPU, but {seen} can be seen"
        remedy = "install a CUDA build of torch the way ComfyUI's own instructions say for your GPU"
        yield Finding("torch build", "broken", finding, remedy)
    if gpus and installed.get("xfuser") and not installed.get("triton"):
        why = (
            "xfuser imports triton without asking for it, and engine xfuser cannot start without it on a GPU"
        )
        yield Finding("xfuser + triton", "slow", why, "pip install triton, or use engine native")
    if gpus and not installed.get("nvidia-ml-py") and "rocm" not in torch:
        finding = (
            "is not installed, so links, NUMA nodes and MIG slices stay unknown to the choice of a strategy"
        )
        yield Finding("nvidia-ml-py", "slow", finding, "pip install nvidia-ml-py")


def check_classes(version: str, untested: Sequence[str]) -> Finding:
    """Reports whether the pack knows the models of this ComfyUI. `untested`: model classes with untested code."""
    if not untested:
        return Finding("ComfyUI", "ok", f"{version}: its models compute as the pack knows them")
    count = len(untested)
    return Finding(
        "ComfyUI",
        "ok",
        f"{version}: {count} kinds of models have new code; each is tested once, 10 to 20 s, before it first runs",
        details=tuple(untested),
    )


def check_platform(platform: str, release: str) -> Finding:
    """Checks for Linux and for WSL2 (no peer access of GPUs). `platform`: sys.platform; `release`: the kernel's."""
    if platform != "linux":
        return Finding(
            "system", "broken", f"{platform}: the processes need Linux", "on Windows run ComfyUI inside WSL2"
        )
    if "microsoft" in release.lower():
        return Finding(
            "system",
            "slow",
            "Linux in WSL2: GPUs have no peer access there, so what they exchange goes through host memory",
            "boot Linux itself where links between GPUs matter; CFG parallelism hardly needs them",
        )
    return Finding("system", "ok", "Linux")


def _check_bound(name: str, version: str) -> Finding:
    bound = next(b for b in BOUNDS if b.package == name)
    if not version:
        status = bound.status if bound.required else "skipped"
        return Finding(name, status, f"is not installed: {bound.why}", bound.remedy)
    if parse(version) < parse(bound.least):
        return Finding(
            name, bound.status, f"{version} is older than {bound.least}: {bound.why}", bound.remedy
        )
    tested = TESTED.get(name)
    if tested and parse(version)[:2] > parse(tested)[:2]:
        return Finding(name, "ok", f"{version}; tested with {tested}, this is newer")
    return Finding(name, "ok", version)


def parse(version: str) -> tuple[int, ...]:
    """Returns the release numbers of a version, without build and pre-release: 2.13.0a1+cu128 -> (2, 13, 0)."""
    release = re.match(r"\d+(\.\d+)*", version.strip().lstrip("v"))
    return tuple(map(int, release[0].split("."))) if release else ()
