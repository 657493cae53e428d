"""The identity of a weights file by its content, and the search for that file in a machine's own model folders."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path, PurePath

from ..errors import CheckpointError
from ..requests import FileContent
from ..wire.file_identity import read_header

# Models of one family can have the same header, so 32 samples of the data, 4096 bytes each, are hashed as well.
_SAMPLES, _SAMPLE = 32, 4096
_DEMO = Path(__file__).resolve().parents[2] / "demo_model"  # part of the pack, so every machine has it


def content_of(path: Path) -> FileContent:
    """Hashes the header and 128 KiB of the data of a file of any size. Raises CheckpointError if it cannot be read."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest = hashlib.sha256(read_header(file, size))
            first = file.tell()
            for sample in range(_SAMPLES):
                file.seek(first + (size - first) * sample // _SAMPLES)
                digest.update(file.read(_SAMPLE))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from None
    return FileContent(size, digest.hexdigest())


def find_model(folders: Sequence[Path], path: PurePath, content: FileContent, machine: str) -> Path:
    """Returns the file with this content that shares the name of `path`, and as many of its parent folders as possible,
    in one of `folders`. The demo model is found in the pack. Raises CheckpointError, which names the machine."""
    searched = ", ".join(map(str, folders))
    different: Path | None = None
    for count in range(len(path.parts) - 1, 0, -1):
        for folder in folders:
            found = folder.joinpath(*path.parts[-count:])
            if not found.is_file():
                continue
            if found.stat().st_size == content.size and content_of(found) == content:
                return found
            different = different or found
    demo = _DEMO / path.name
    if demo.is_file() and content_of(demo) == content:
        return demo
    if different is not None:
        raise CheckpointError(
            f"Machine {machine} has another file under the name {path.name}: {different}, of "
            f"{different.stat().st_size:,} bytes, where the one chosen in ComfyUI has {content.size:,} or other "
            f"contents. Copy that one to the machine."
        )
    if not folders:
        raise CheckpointError(
            f"Machine {machine} was started without --models, so it has no folder to look for {path.name} in."
        )
    raise CheckpointError(
        f"Machine {machine} has no {path.name} (searched {searched}). Copy it there, in the folder that it has under "
        f"ComfyUI's models or in any above, or start torchrun there with --models for the folder that has it."
    )
