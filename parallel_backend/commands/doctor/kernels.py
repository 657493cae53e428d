"""Findings about attention kernels: which are installed, and whether the one that would be used works."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from ...wire.calibration import RankFacts
from ...wire.checks.findings import Finding

# The kernels by their name in Parallel Flux Loader, and the importable package that each needs.
KERNELS = {
    "flash_3": "flash_attn_interface",
    "flash": "flash_attn",
    "sage": "sageattention",
}


def check_kernels(packages: Collection[str], facts: Sequence[RankFacts], on_gpus: bool) -> Iterator[Finding]:
    """Yields a finding on the installed kernels and one on the kernel in use. `packages`: those of KERNELS that can be
    imported; `facts`: the ranks' reports on the kernel that they would use."""
    found = [name for name, package in KERNELS.items() if package in packages]
    listed = ", ".join(["torch", *found])
    if on_gpus and not {"flash_3", "flash"} & set(found):
        remedy = "FlashAttention (pip install flash-attn) can be faster on GPUs before Hopper"
        yield Finding("installed", "ok", f"{listed} (torch's own kernels)", remedy)
    else:
        yield Finding("installed", "ok", listed)
    broken = next((f for f in facts if f.kernel_problem), None)
    if not facts:
        yield Finding("in use", "skipped", "no process could be asked")
    elif broken is not None:
        yield Finding(
            "in use",
            "broken",
            f"{broken.kernel or 'the attention kernel'} does not work here: {broken.kernel_problem}",
            "install a build of it that fits this torch, remove it, or choose attention: torch in "
            "Parallel Flux Loader",
        )
    else:
        names = ", ".join(dict.fromkeys(f.kernel for f in facts))
        yield Finding("in use", "ok", f"{names}, compared with exact attention")
