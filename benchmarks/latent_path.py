"""Traces a plain job on warm ranks: lists the files that run, and those of them that are given the latent.

    python benchmarks/latent_path.py [--json]

Two ranks on the CPU, Ulysses 2, a random Flux: the exact path of every sequence-parallel job. docs/how-it-works.md
describes the path of ComfyUI's jobs, which starts in nodes/ and needs ComfyUI.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import FrameType

BACKEND = Path(__file__).resolve().parents[1] / "parallel_backend"


def carries(value: object) -> bool:
    """Returns True if `value` is a tensor or contains one, as requests, rows and payloads do."""
    from torch import Tensor

    if isinstance(value, Tensor):
        return True
    if isinstance(value, dict):
        return any(map(carries, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(carries, value))
    return is_dataclass(value) and any(carries(getattr(value, each.name, None)) for each in fields(value))


@contextmanager
def traced(files: dict[str, bool]) -> Iterator[None]:
    """Fills `files` during the block: each backend file with a call, in order, and True if a call got a tensor."""

    def profile(frame: FrameType, event: str, _: object) -> None:
        file = Path(frame.f_code.co_filename)
        if event != "call" or not file.is_relative_to(BACKEND):
            return
        name = str(file.relative_to(BACKEND))
        code = frame.f_code
        arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        files[name] = files.get(name, False) or any(
            carries(frame.f_locals.get(each)) for each in arguments if each != "self"
        )

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


def notes(parent: int, rank: int) -> Path:
    return Path(tempfile.gettempdir()) / f"latent-path-{parent}-{rank}.txt"


def be_a_rank() -> None:
    """Runs a normal rank that also writes down the files of its latest job."""
    from parallel_backend.rank.__main__ import main
    from parallel_backend.rank.work.worker import RankWorker

    class TracedWorker(RankWorker):
        def run_plain_job(self, *args, **others):
            files: dict[str, bool] = {}
            with traced(files):
                found = super().run_plain_job(*args, **others)
            lines = "".join(f"{name} {int(given)}\n" for name, given in files.items())
            notes(os.getppid(), self.world.rank).write_text(lines)
            return found

    main(TracedWorker)


def main() -> None:
    from subject import finish, make_parser, random_flux, ranks_on, sample_request

    from parallel_backend.requests import Placement
    from parallel_backend.strategy import ParallelStrategy

    args = make_parser(__doc__).parse_args()
    request, placement = sample_request(16, steps=3), Placement(ParallelStrategy(ulysses_degree=2))
    here: dict[str, bool] = {}
    there: dict[str, bool] = {"rank/__main__.py": True}  # it calls the worker, so it is never traced
    with (
        random_flux(heads=2, double_blocks=1, single_blocks=1) as spec,
        ranks_on("cpu:0", "cpu:1", rank_module="benchmarks.latent_path") as sidecar,
    ):
        sidecar.sample(spec, request, placement)
        with traced(here):
            sidecar.sample(spec, request, placement)
    for rank in range(2):
        for line in notes(os.getpid(), rank).read_text().splitlines():
            name, given = line.split()
            there[name] = there.get(name, False) or given == "1"
        notes(os.getpid(), rank).unlink()
    files = {name: here.get(name, False) or there.get(name, False) for name in (*here, *there)}
    latent = [name for name, given in files.items() if given]
    print(f"{len(files)} files run, {len(latent)} of them are given the latent:")
    for name in files:
        where = "both" if name in here and name in there else "ComfyUI" if name in here else "ranks"
        print(f"  {'latent' if files[name] else '':8s}{where:9s}{name}")
    finish({"latent": latent, "files": list(files)}, args.json)


if __name__ == "__main__":
    be_a_rank() if "--fd" in sys.argv else main()
