"""Make torchvision and torchaudio importable beside a CPU torch, inside the checkout's .venv alone.

ComfyUI imports both. Some package sources carry them for CUDA only: torchvision's import then stops because its
compiled half, which declares ``torchvision::nms``, cannot be loaded, and torchaudio's because its libraries link CUDA.
Neither is needed to sample an image. Where the imports work, which is the normal case, nothing is touched.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from steps import SetupError, step

_HOOK_NAME = "declare_torchvision_schemas"

# Runs at every start of the .venv's Python, so it must cost nothing until torchvision is really imported.
_HOOK = '''"""Declare torchvision's operator schemas before torchvision is imported (CPU torch, CUDA torchvision)."""
import sys


class _DeclareSchemas:
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            self.library = torch.library.Library("torchvision", "DEF")
            self.library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            self.library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            sys.modules[__name__].library = self.library
        return None


sys.meta_path.insert(0, _DeclareSchemas())
'''


def repair_if_needed(python: Path) -> None:
    """Repair the two imports in ``python``'s environment; a torch with CUDA is left alone.

    Raises:
        SetupError: torchvision still cannot be imported.
    """
    if _imports(python, "torchvision") and _imports(python, "torchaudio"):
        return
    if _answer(python, "import torch; print(torch.version.cuda)") != "None":
        raise SetupError(
            "torchvision or torchaudio cannot be imported beside this CUDA torch; ComfyUI needs both.\n"
            f"Remove the folder {python.parent.parent} and run this again."
        )
    site_packages = Path(_answer(python, "import sysconfig; print(sysconfig.get_path('purelib'))"))
    with step("Fitting torchvision and torchaudio to a CPU-only torch (in .venv)"):
        if not _imports(python, "torchvision"):
            (site_packages / f"{_HOOK_NAME}.py").write_text(_HOOK)
            (site_packages / f"{_HOOK_NAME}.pth").write_text(f"import {_HOOK_NAME}\n")
        if not _imports(python, "torchaudio"):
            for library in (site_packages / "torchaudio" / "lib").glob("*.so"):
                library.unlink()
    for package in ("torchvision", "torchaudio"):
        if not _imports(python, package):
            raise SetupError(f"{package} cannot be imported beside this torch, and ComfyUI needs it.")


def _imports(python: Path, package: str) -> bool:
    return subprocess.run([python, "-c", f"import {package}"], capture_output=True).returncode == 0


def _answer(python: Path, program: str) -> str:
    return subprocess.run([python, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
