#!/usr/bin/env python3
"""Writes docs/models.md: every model that ComfyUI knows, and how its calls are split. `--check` only compares.

ComfyUI names the module class of a configuration only when it builds the module, so each configuration's `get_model`
is called and stopped at that point.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from comfyui_source import comfyui_version, find_comfyui
from parallel_backend.engine.attention.queries import MIN_KEYS
from parallel_backend.models.proof.states import entry_digest, is_proven
from parallel_backend.models.tokens.cached_outputs import why_not_reused
from parallel_backend.models.tokens.table import TABLE, has_stages, slices_layers, state_of
from parallel_backend.requests import ATTENTION, ROWS, STAY
from steps import SetupError

PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
_VERSION = "ComfyUI {}."

_CONVOLUTIONS = "its convolutions look at neighbours, so the positions of an image cannot be apart"
_KEEPS = "keeps keys and values from call to call"
_NO_SAMPLING = "looks at pictures and samples none"
_WHY = {  # for classes that are not in the table
    "StageB": _CONVOLUTIONS,
    "StageC": _CONVOLUTIONS,
    "AsymmDiTJoint": "crops the text inside of attention, whose tokens then are others",
    "CausalWanModel": _KEEPS,
    "GeneralDIT": (
        "adds the whole video's positions between its blocks, whose tokens lie by frame, row and column, batch last"
    ),
    "HiDreamO1Transformer": (
        "attends in two passes of its own, a text that sees what is before it and an image that sees all"
    ),
    "ACEStepTransformer2DModel": "its linear attention sums over all tokens, without ComfyUI's attention",
    "AudioDiffusionTransformer": "its files differ in how often a block attends, and some convolve over time",
    "NaDiT": "attends in windows that lie across its tokens",
    "RTv4": _NO_SAMPLING,
    "SAM3Model": _NO_SAMPLING,
    "DepthAnything3Net": _NO_SAMPLING,
}
_UNDESCRIBED = "its blocks are not described yet"

_PAGE = """# Models

Written by `scripts/list_models.py` from the models that ComfyUI itself knows (comfy.supported_models), here of
{version} Any of them runs on several devices behind **Parallel Model**. What differs is how far one image or video can
be split, and that depends on the module class that computes it.

| state | the sequence axes (Ulysses, Ring) | CFG and data |
| --- | --- | --- |
| **stay** | tokens stay apart from the first block to the last; a call with other arguments is as in *block* | yes |
| **block** | each block gathers what it gives: exact whatever lies between blocks, with more traffic | yes |
| **bands** | each device computes a band of the image's rows and asks the others for what its layers need | yes |
| **attention** | only the queries of attention are shared out; each device computes all else | yes |
| **rows** | none: whole images and prompts only | yes |

**By proof.** An entry counts for the sources that it was proven on: a digest of the class's file and of all below
`comfy/ldm` that it imports (`models/proof/proven.json`). With other sources the class is tested before
it first runs, on the CPU, in 10 to 20 seconds: tiny modules of that class on two processes against one. The
result is kept beside the measurements (`self-tests.sqlite`). A class that fails is *rows* there, *block* where
only tokens that stay apart are wrong, or *attention* in place of *bands*, and the report of a run says so.
`scripts/prove_models.py` tests all of them.
PipeFusion, beside Parallel Flux Loader's models, lays out the blocks of {staged} ([how](pipefusion.md)); the step cache
works for all of these but {not_reused} ([how](step-cache.md)).
[templates.md](templates.md) says which graphs of ComfyUI's template library run, and how.

## {described} classes that can be split

| module | models | state | tokens stay with | proven |
| --- | --- | --- | --- | --- |
{split}

**Bands.** One image of a UNet (SD1.5, SD2, SDXL and its refiner, Stable Video Diffusion, their inpainting and upscaling
variants) is cut into bands of rows, one for each device: 3 x 3 convolutions get a row of each neighbour, group norms
the moments of all, attention to the image itself the keys and values of all; attention to the prompt and the mixing of
frames need nothing. So SDXL at CFG 1 gains from a second device, and with a negative prompt from a third and fourth:
`auto` shares out the two prompts first, then bands. The degree is `ulysses_degree` (or `ring_degree`, which does the
same); reports say *bands*. An image has at most as many bands as rows at the UNet's lowest resolution: SDXL's halves
them twice (32 rows for 1024 pixels), SD1.5's three times (8 rows for 512). Smaller ones share out attention only, and
the report says so. Blocks are not compiled ([why so](decisions/046-attention-only-and-bands-of-unets.md)).

**Attention only** is exact for any model that calls ComfyUI's attention, without a proof. Every device computes all
else, and each answer to a query goes to all others. So attention to fewer
than {keys} keys stays whole on each device, and a call with as many images and prompts as devices shares out those
instead. `auto` takes it where attention is a third of the arithmetic or more, and tries one device against it while it
samples; by hand it is `ulysses_degree`. By arithmetic: in a video of 44,000 tokens of a model 3,072 wide attention is
70 %, and four devices would make a step at most 2.1 × as fast as one. It has not been measured on GPUs
([why so](decisions/046-attention-only-and-bands-of-unets.md)).

## Split layers

`tensor_degree` gives each device some heads and hidden channels of every layer, and so its part of the weights, for
{sliced}:
from plain files in bf16, fp16, fp32 and fp8, and from fp8 with one scale for each layer. LoRAs count, those of prompts'
hooks too. It goes with CFG, data, Ulysses, Ring and `shard_weights`, where it divides the heads.
Refused by name: code of nodes that takes part within blocks, that sets a weight, wraps it or asks for all, GGUF, and
formats with a scale for each part of a layer. `auto` never chooses it.

## {attention} classes of which attention alone can be split

| module | models | why not more |
| --- | --- | --- |
{attending}

## {others} classes of which only rows are shared out

| module | models | why |
| --- | --- | --- |
{rows}
"""


@dataclass(frozen=True)
class Configuration:
    """A model that ComfyUI knows. `module`: its diffusion model's class, empty if ComfyUI does not name it."""

    name: str
    module: str

    @property
    def state(self) -> str:
        return state_of(self.module)


class _Named(Exception):
    """Carries the class name of a module out of the code that would build it."""


class _AnyTensor(dict[str, Any]):
    """The tensors of a file that has every tensor."""

    def __missing__(self, name: str) -> Any:
        import torch

        return torch.empty(1)


class _AnyNumber(dict[str, Any]):
    """A configuration's settings, with 1 for each that ComfyUI would have detected in a file."""

    def __missing__(self, name: str) -> int:
        return 1


def configurations() -> list[Configuration]:
    """Returns the configurations of the imported ComfyUI, in its order."""
    import comfy.supported_models

    with _module_named():
        return [Configuration(one.__name__, _module_of(one)) for one in comfy.supported_models.models]


def _module_of(configuration: Any) -> str:
    try:
        one = configuration(_AnyNumber(configuration.unet_config))
        one.unet_config = _AnyNumber(one.unet_config)  # the constructor has copied it to a plain dict
        one.get_model(_AnyTensor(), "", device="cpu")
    except _Named as found:
        return str(found)
    except Exception:  # it needs more of a file than that: unknown, so only rows
        return ""
    return ""


@contextmanager
def _module_named() -> Iterator[None]:
    """Makes the building of a model raise _Named with the class of its module, inside the block."""
    from comfy.model_base import BaseModel

    stock = BaseModel.__init__
    signature = inspect.signature(stock)

    def stop(*args: Any, **kwargs: Any) -> NoReturn:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        raise _Named(bound.arguments["unet_model"].__name__)

    BaseModel.__init__ = stop
    try:
        yield
    finally:
        BaseModel.__init__ = stock


def page(root: Path, found: list[Configuration]) -> str:
    """Returns the text of docs/models.md for the ComfyUI in folder `root`."""
    models: dict[str, list[str]] = {}
    for one in found:
        models.setdefault(one.module, []).append(one.name)
    split = [module for module in models if module in TABLE]
    attending = [module for module in models if state_of(module) == ATTENTION]
    rows = [module for module in models if state_of(module) == ROWS]
    return _PAGE.format(
        version=_VERSION.format(comfyui_version(root)),
        described=len(split),
        attention=len(attending),
        others=len(rows),
        keys=f"{MIN_KEYS:,}",
        sliced=", ".join(filter(slices_layers, sorted(split))),
        staged=", ".join(filter(has_stages, sorted(split))),
        not_reused=", ".join(module for module in sorted(split) if why_not_reused(module, STAY)),
        attending="\n".join(_rows_line(module, models[module]) for module in sorted(attending)),
        split="\n".join(_split_line(root, module, models[module]) for module in sorted(split)),
        rows="\n".join(_rows_line(module, models[module]) for module in sorted(rows)),
    )


def _split_line(root: Path, module: str, models: list[str]) -> str:
    entry = TABLE[module]
    state = Configuration("", module).state
    words = ", ".join(f"`{name}`" for name in sorted(entry.stays_with)) or ("–" if entry.bands else "nothing")
    proven = "yes" if is_proven(module, entry_digest(str(root), module)) else "when first used"
    return f"| {module} | {', '.join(models)} | **{state}** | {words} | {proven} |"


def _rows_line(module: str, models: list[str]) -> str:
    why = _WHY.get(module, _UNDESCRIBED) if module else "ComfyUI does not tell which module it builds"
    return f"| {module or '?'} | {', '.join(models)} | {why} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("comfyui", nargs="?", help="ComfyUI's folder; else as scripts/test finds it")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit status 1 where the page is another"
    )
    arguments = parser.parse_args()
    root = find_comfyui(arguments.comfyui)
    if root is None:
        raise SetupError("no ComfyUI found: name its folder, or set COMFYUI_PATH")
    import torch

    from parallel_backend.models.comfyui.environment import import_comfyui
    from parallel_backend.requests import ComfyUISource

    import_comfyui(ComfyUISource(str(root)), torch.device("cpu"))
    text = page(root, configurations())
    if arguments.check:
        return int(not PAGE.is_file() or PAGE.read_text() != text)
    PAGE.write_text(text)
    print(f"{PAGE} is written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
