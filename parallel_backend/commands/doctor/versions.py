"""Findings about the installed versions, from a table of versions that are known not to work and why."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ...wire.checks.findings import Finding

_INSTALL = "pip install -r requirements.txt, in ComfyUI's Python environment, from this pack's folder"


@dataclass(frozen=True)
class Bound:
    """A lower bound: `package` below version `least`, or missing, cannot work if it is `required`, for the reason
    `why`. `tested`: the version that docs/ and the tests were made with; newer ones probably work but are untested."""

    package: str
    least: str
    why: str
    remedy: str = _INSTALL
    required: bool = True
    tested: str = ""


# The lower bounds of requirements.txt, in the report's order: each is the oldest version that has what the code needs.
BOUNDS = (
    Bound("python", "3.10", "the pack uses syntax of 3.10", "a ComfyUI with Python 3.10 or newer"),
    Bound(
        "torch",
        "2.6",
        "sealed payloads, gloo's all-to-all and its attention kernels are used as 2.6 has them",
        "install a newer torch the way ComfyUI's own instructions say for your GPU",
        tested="2.13",
    ),
    Bound(
        "diffusers",
        "0.42",
        "the Flux transformer and its attention dispatch changed up to 0.42",
        tested="0.42",
    ),
    Bound(
        "xfuser",
        "0.7.0",
        "its sequence parallelism was adjusted for 0.7; without it only engine native is there, which is exact too",
        required=False,
        tested="0.7",
    ),
    Bound("safetensors", "0.4.2", "fp8 weights cannot be read"),
    Bound("numpy", "1.25", "torch's bridge to numpy needs it"),
)


def check_versions(installed: Mapping[str, str], gpus: int, torch_problem: str = "") -> Iterator[Finding]:
    """Yields a finding per package, and one per known-bad combination.

    `installed`: versions by name, "" if missing; `torch_problem`: why torch cannot be imported, or empty.
    """
    yield from (_check_bound(bound, installed.get(bound.package, "")) for bound in BOUNDS)
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


def _check_bound(bound: Bound, version: str) -> Finding:
    name = bound.package
    if not version:
        status = "broken" if bound.required else "skipped"
        return Finding(name, status, f"is not installed: {bound.why}", bound.remedy)
    if parse(version) < parse(bound.least):
        status, words = "broken" if bound.required else "slow", f"{version} is older than {bound.least}"
        return Finding(name, status, f"{words}: {bound.why}", bound.remedy)
    if bound.tested and parse(version)[:2] > parse(bound.tested):
        return Finding(name, "ok", f"{version}; tested with {bound.tested}, this is newer")
    return Finding(name, "ok", version)


def parse(version: str) -> tuple[int, ...]:
    """Returns the release numbers of a version, without build and pre-release: 2.13.0a1+cu128 -> (2, 13, 0)."""
    release = re.match(r"\d+(\.\d+)*", version.strip().lstrip("v"))
    return tuple(map(int, release[0].split("."))) if release else ()
