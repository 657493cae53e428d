"""Seconds and GB/s of copying a checkpoint's bytes into a buffer: through the mapping, and by large reads.

    python benchmarks/read_path.py [--gigabytes 2] [--file FILE] [--json]

This is the host's part of loading to a GPU. `mapping` copies each tensor out of the mapped file into a buffer, page
fault by page fault, as the driver does with memory that is not pinned; `staged` reads it into buffers in large reads
(models/staging.py). The copy from there to a GPU is equal for both and left out: no GPU is needed. Cold: the page cache
was asked to drop the file (posix_fadvise DONTNEED), so the disk counts; warm: all of it is in the page cache. Without
--file a file of random bytes is written to the temporary folder and deleted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from parallel_backend.models.staging import PIECE, StagedReader

_TENSOR_BYTES = 75_497_472  # a linear layer of Flux, 3072 x 12288 in bf16
_NOWHERE = torch.device("meta")  # a copy to it moves no bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--file", type=Path, help="a .safetensors file to read in place of a made-up one")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="the last line is JSON")
    arguments = parser.parse_args()
    if arguments.file is not None:
        report(measure(arguments.file, arguments.repeats), arguments.json)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights.safetensors"
        write(path, int(arguments.gigabytes * 1e9))
        report(measure(path, arguments.repeats), arguments.json)


def write(path: Path, size: int) -> None:
    count = max(1, size // _TENSOR_BYTES)
    save_file(
        {f"blocks.{n}.weight": torch.randint(256, (_TENSOR_BYTES,), dtype=torch.uint8) for n in range(count)},
        path,
    )


def measure(path: Path, repeats: int) -> dict[str, dict[str, float]]:
    """Returns the best of `repeats` runs of each way, cold and warm; the ways take turns."""
    size = path.stat().st_size
    ways: dict[str, Callable[[Path], None]] = {"mapping": by_mapping, "staged": by_staging}
    best: dict[str, tuple[float, float]] = {}
    for _ in range(repeats):
        for name, read in ways.items():
            for state in ("cold", "warm"):
                if state == "cold":
                    drop_from_cache(path)
                began, worked = time.perf_counter(), time.process_time()
                read(path)
                took = (time.perf_counter() - began, time.process_time() - worked)
                key = f"{name} {state}"
                best[key] = min(best.get(key, took), took)
    return {
        key: {
            "seconds": round(seconds, 4),
            "cpu_seconds": round(cpu, 4),
            "gb_per_s": round(size / seconds / 1e9, 3),
        }
        for key, (seconds, cpu) in best.items()
    }


def by_mapping(path: Path) -> None:
    buffer = torch.empty(PIECE, dtype=torch.uint8)
    with safe_open(path, framework="pt", device="cpu") as file:
        for name in file.keys():  # noqa: SIM118
            found = file.get_tensor(name).reshape(-1).view(torch.uint8)
            for begin in range(0, len(found), PIECE):
                part = found[begin : begin + PIECE]
                buffer[: len(part)].copy_(part)


def by_staging(path: Path) -> None:
    with safe_open(path, framework="pt", device="cpu") as file, StagedReader(path, file, _NOWHERE) as reader:
        for name in file.keys():  # noqa: SIM118
            reader.to_device(file.get_tensor(name))


def drop_from_cache(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)  # what is not written yet cannot be dropped
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def report(found: dict[str, dict[str, float]], as_json: bool) -> None:
    for key, row in found.items():
        print(
            f"{key:14} {row['seconds']:8.3f} s ({row['cpu_seconds']:.3f} s CPU)  {row['gb_per_s']:6.2f} GB/s"
        )
    if as_json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
