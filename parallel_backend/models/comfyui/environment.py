"""Imports the user's own ComfyUI in a rank, with the flags of its command line and with its attention routed.

A rank runs no server and no custom nodes. It leaves its model in place, so ComfyUI's memory management is idle.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path

import torch

from ...errors import RequestError
from ...requests import ComfyUISource
from .attention_router import install_router

# A flag of ComfyUI's command line: build models in host memory, however much memory the device has free.
_ALWAYS = ("--disable-smart-memory",)


_imported: tuple[str, tuple[str, ...]] | None = None  # ComfyUI's folder, and the flags of its command line


def import_comfyui(source: ComfyUISource, device: torch.device) -> None:
    """Imports the user's ComfyUI as `comfy`, set up for `device`. A process can import only one ComfyUI.

    Raises RequestError for a folder without ComfyUI, for flags that it does not know, and for a second ComfyUI.
    """
    global _imported
    flags = tuple(dict.fromkeys((*source.flags, *_ALWAYS, *(("--cpu",) if device.type == "cpu" else ()))))
    named = os.path.realpath(source.root), flags
    if _imported is None:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # ComfyUI uses the current device
        _import(*named, device)
        _imported = named
    elif named != _imported:
        raise RequestError(
            f"The processes have imported ComfyUI from {_imported[0]} with the flags {' '.join(_imported[1])}, "
            f"and this model asks for {named[0]} with {' '.join(flags)}; Python cannot take an import back. "
            f"Restart ComfyUI, so that the processes start anew."
        )


def _import(folder: str, flags: tuple[str, ...], device: torch.device) -> None:
    root = Path(folder)
    if not (root / "comfy" / "cli_args.py").is_file():
        raise RequestError(
            f"{root} is not ComfyUI's folder: it has no comfy/cli_args.py. The processes run the modules of the "
            f"ComfyUI that they are told of; start them from there."
        )
    # At the end: ComfyUI's folder has modules with common names, such as `nodes`, `utils` and `server`.
    sys.path.append(folder)
    # `comfy` has no __init__.py, so a package of that name elsewhere on the path would win or mix with it.
    spec = ModuleSpec("comfy", None, is_package=True)
    spec.submodule_search_locations = [str(root / "comfy")]
    sys.modules["comfy"] = module_from_spec(spec)
    try:
        _read_command_line(flags)
        _import_modules(flags, device)
    except BaseException:
        sys.path.remove(folder)
        for name in [name for name in sys.modules if name.partition(".")[0] == "comfy"]:
            del sys.modules[name]
        raise


def _import_modules(flags: tuple[str, ...], device: torch.device) -> None:
    """Imports all that loading needs, so that the first load is not timed with it."""
    try:
        install_router(device)
        import comfy.model_management
        import comfy.sd
    except SystemExit:  # the package of a kernel is missing here, though ComfyUI's process may have it
        raise RequestError(
            f"ComfyUI does not start with the flags {' '.join(flags)} where this process runs; the processes' output "
            f"says why. Install what is missing there, or start ComfyUI without the flag."
        ) from None
    # Applies --fast autotune. ComfyUI's server calls this at its start; older versions do it on import.
    getattr(comfy.model_management, "set_cudnn_benchmark", lambda: None)()


def _read_command_line(flags: tuple[str, ...]) -> None:
    """Imports `comfy.cli_args` with `flags` as the command line, which it parses on import."""
    import comfy.options

    own = sys.argv
    sys.argv = ["main.py", *flags]
    comfy.options.enable_args_parsing(True)
    try:
        import comfy.cli_args
    except SystemExit:
        raise RequestError(
            f"This ComfyUI does not know one of the flags {' '.join(flags)}; the processes' output says which. Start "
            f"ComfyUI without it."
        ) from None
    finally:
        comfy.options.enable_args_parsing(False)
        sys.argv = own
