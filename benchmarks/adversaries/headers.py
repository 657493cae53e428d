"""Model files with damaged headers: each must be read or refused in words, quickly and with little memory.

The loader, validation before the queue, the panel's preview, the doctor and the list of models all read a file through
models/comfyui/model_file.inspect.
"""

from __future__ import annotations

import json
import random
import resource
import signal
import struct
import tempfile
from pathlib import Path

import gguf
import numpy
import torch
from safetensors.torch import save

from gguf_files import finish
from parallel_backend.errors import CheckpointError
from parallel_backend.models.comfyui.model_file import inspect

from .findings import Findings

MAX_SECONDS = 5  # for one file of a few KB, on a busy machine
MAX_GROWTH = 64 * 2**20  # bytes by which this process may grow over all files
_EXTREMES = (0, 1, 0x7F, 0xFF, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1)


class _Hang(BaseException):
    """A file took longer than MAX_SECONDS."""


def fuzz_headers(number: int, findings: Findings) -> None:
    """Reads `number` damaged files from a fixed seed: half GGUF, half safetensors with a quantised layer."""
    draw = random.Random(35)
    before = signal.signal(signal.SIGALRM, _raise_hang)
    try:
        with tempfile.TemporaryDirectory() as folder:
            valid = {".gguf": _gguf(Path(folder)), ".safetensors": _safetensors()}
            for suffix, content in valid.items():
                _read(Path(folder) / f"valid{suffix}", content, findings)
            at_first = _resident_bytes()
            for _ in range(number // 2):
                for suffix, content in valid.items():
                    _read(Path(folder) / f"fuzzed{suffix}", _damaged(content, draw), findings)
        growth = _resident_bytes() - at_first
    finally:
        signal.signal(signal.SIGALRM, before)
    if growth > MAX_GROWTH:
        findings.add("leaks", f"{number} headers: {growth >> 20} MiB")


def _read(path: Path, content: bytes, findings: Findings) -> None:
    path.write_bytes(content)
    findings.prompts += 1
    signal.alarm(MAX_SECONDS)
    try:
        file = inspect(path)
        if not 0 < file.tensor_bytes <= len(content):
            findings.add("wrong", f"{file.tensor_bytes} bytes in a file of {len(content)}: {content[:60]!r}")
    except CheckpointError as error:
        if path.name not in str(error) or len(str(error)) > 600:
            findings.add("bare_errors", str(error))
    except _Hang:
        findings.add("hangs", f"{path.suffix}: {content[:60]!r}")
    except Exception as error:
        findings.add("bare_errors", f"{type(error).__name__}: {error}")
    finally:
        signal.alarm(0)


def _raise_hang(*_: object) -> None:
    raise _Hang


def _damaged(content: bytes, draw: random.Random) -> bytes:
    """Returns `content` with one to four random changes, most of them in the header."""
    changed = bytearray(content)
    for _ in range(draw.randint(1, 4)):
        place = draw.randrange(min(len(changed), 1500) or 1)
        match draw.randrange(5):
            case 0:
                changed[place : place + 1] = draw.randbytes(1)
            case 1:
                changed[place : place + 8] = struct.pack("<Q", draw.choice(_EXTREMES))
            case 2:
                changed[place : place + 4] = struct.pack("<I", draw.choice(_EXTREMES) & 0xFFFFFFFF)
            case 3:
                changed[place:place] = changed[place : place + draw.randint(1, 40)]
            case 4:
                del changed[place : place + draw.choice((1, 8, 40, len(changed)))]
    return bytes(changed)


def _gguf(folder: Path) -> bytes:
    path = folder / "made.gguf"
    writer = gguf.GGUFWriter(str(path), "flux")
    writer.add_custom_alignment(32)
    writer.add_array("a.list", [1, 2, 3])
    writer.add_array("a.words", ["one", "two"])
    writer.add_array("comfy.gguf.orig_shape.blocks.0.norm.weight", [4, 16])
    for block in range(3):
        for name in ("q", "k", "v"):
            packed = gguf.quants.quantize(numpy.ones((8, 64), numpy.float32), gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(
                f"blocks.{block}.{name}.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0
            )
        writer.add_tensor(f"blocks.{block}.norm.weight", numpy.ones(64, numpy.float32))
    return finish(writer, path).read_bytes()


def _safetensors() -> bytes:
    note = torch.tensor(list(json.dumps({"format": "int8_tensorwise"}).encode()), dtype=torch.uint8)
    tensors = {"img_in.weight": torch.ones(8, 8)}
    for block in range(3):
        name = f"blocks.{block}"
        tensors[f"{name}.q.weight"] = torch.ones(8, 8, dtype=torch.int8)
        tensors[f"{name}.q.weight_scale"] = torch.ones(())
        tensors[f"{name}.q.comfy_quant"] = note.clone()
        tensors[f"{name}.norm.weight"] = torch.ones(8, dtype=torch.bfloat16)
    return save(tensors, {"format": "pt"})


def _resident_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
