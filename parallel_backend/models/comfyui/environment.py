"""The user's own ComfyUI in a rank: its folder on the path, its command line's flags, its attention routed.

No server, no custom nodes, and ComfyUI's memory management has nothing to manage: a rank keeps its model where it is.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path

import torch

from ...errors import RequestError
from ...requests import ComfyUISource
from .attention_router import install_router

# Of ComfyUI's command line: models are built in host memory, whatever the device has free.
_ALWAYS = ("--disable-smart-memory",)


@dataclass(frozen=True)
class _Imported:
    root: str
    flags: tuple[str, ...]


_imported: _Imported | None = None


def import_comfyui(source: ComfyUISource, device: torch.device) -> None:
    """Makes `comfy` importable as the user's ComfyUI would have it on `device`. A process can do that for one only.

    Raises RequestError for a folder without ComfyUI, flags that it does not know, and for a second ComfyUI.
    """
    global _imported
    flags = tuple(dict.fromkeys((*source.flags, *_ALWAYS, *(("--cpu",) if device.type == "cpu" else ()))))
    named = _Imported(os.path.realpath(source.root), flags)
    if _imported is None:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # ComfyUI takes the current one
        _import(named, device)
        _imported = named
    elif named != _imported:
        raise RequestError(
            f"The processes have imported ComfyUI from {_imported.root} with the flags {' '.join(_imported.flags)}, "
            f"and this model asks for {named.root} with {' '.join(named.flags)}; Python cannot take an import back. "
            f"Restart ComfyUI, so that the processes start anew."
        )


def _import(named: _Imported, device: torch.device) -> None:
    root = Path(named.root)
    if not (root / "comfy" / "cli_args.py").is_file():
        raise RequestError(
            f"{root} is not ComfyUI's folder: it has no comfy/cli_args.py. The processes run the modules of the "
            f"ComfyUI that they are told of; start them from there."
        )
    # Last: ComfyUI's folder has modules such as `nodes`, `utils` and `server`, whose names others have too.
    sys.path.append(named.root)
    # `comfy` has no __init__.py, and a package of that name elsewhere on the path would win or mix with it.
    spec = ModuleSpec("comfy", None, is_package=True)
    spec.submodule_search_locations = [str(root / "comfy")]
    sys.modules["comfy"] = module_from_spec(spec)
    try:
        _read_command_line(named.flags)
        _import_modules(named.flags, device)
    except BaseException:
        sys.path.remove(named.root)
        for name in [name for name in sys.modules if name.partition(".")[0] == "comfy"]:
            del sys.modules[name]
        raise


def _import_modules(flags: tuple[str, ...], device: torch.device) -> None:
    """All that loading needs, before the first load is timed."""
    try:
        install_router(device)
        import comfy.model_management
        import comfy.sd
    except SystemExit:  # where a kernel's package is missing, which ComfyUI's own process may have elsewhere
        raise RequestError(
            f"ComfyUI does not start with the flags {' '.join(flags)} where this process runs; the processes' output "
            f"says why. Install what is missing there, or start ComfyUI without the flag."
        ) from None
    # By --fast autotune, as ComfyUI's server does when it starts; an older ComfyUI does when it is imported.
    getattr(comfy.model_management, "set_cudnn_benchmark", lambda: None)()


def _read_command_line(flags: tuple[str, ...]) -> None:
    """`comfy.cli_args` parses the process's command line when it is imported, and this process has another one."""
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
