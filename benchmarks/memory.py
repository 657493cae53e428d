"""Memory of real ranks against the prediction, and the host memory that 2 and 4 ranks take to hold one file.

python benchmarks/memory.py [--megabytes 400] [--tokens 2048] [--only ulysses_2 …] [--host 2 4] [--glibc] [--json]
python benchmarks/memory.py --full-size [--only sd15_bands …] [--json]

With --full-size: all private memory of fresh ranks, including the process itself, against the prediction. The job is
two steps of ComfyUI's own networks at 256 x 256 (full_size.py; it needs 10 GB of disk and a quarter of an hour).

Otherwise three measurements. Each uses fresh ranks that first run a small model in the same way and then drop its
weights, so that imports, threads and first uses of libraries are in the baseline:
- host: the growth of the ranks' summed proportional set sizes (Pss: a page that n processes map counts 1/n for each) by
  a job that reads every weight. Only the file's pages and memory without a file count: the share of a library that
  counts for a rank changes whenever another process that maps it starts or ends;
- weights: bytes that a rank holds after such a job: the anonymous memory gained, and the file's pages that it maps. The
  CPU uses weights in place in the mapped file; a GPU would copy them to its memory;
- prediction: the most anonymous memory (RssAnon, read every 2 ms) that a job adds to a rank, against planner/workload.
  The ranks start with a low MALLOC_MMAP_THRESHOLD_, so that they give freed memory back: memory in use is what the
  model predicts and what torch.cuda.max_memory_allocated counts. With --glibc they start as they do in ComfyUI, and
  glibc keeps freed memory in its heap.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import full_size
from subject import SIZES, finish, make_parser, random_flux, ranks_on, sample_request

from parallel_backend.models.registry import inspect_model
from parallel_backend.planner.plan import job_from_request
from parallel_backend.planner.workload.checkpoint_model import CheckpointModel
from parallel_backend.planner.workload.memory import predict_memory
from parallel_backend.planner.workload.rank_memory import CPU_BASE_BYTES, RankMemory
from parallel_backend.requests import BANDS, ROWS, STAY, ModelSpec, Placement, SampleRequest
from parallel_backend.sidecar.sidecar import Sidecar
from parallel_backend.strategy import ParallelStrategy
from shipped_jobs import ship

SAMPLE_EVERY = 0.002  # seconds between two readings of a rank's memory
FEW = 16  # tokens, for a job that reads every weight and needs little other memory
STEPS = 3  # one warm-up step and two with flowing patches; later steps would allocate nothing new
MIDDLE = (6, 2, 4)  # heads, double and single blocks of the predicted jobs
LARGE_HEADS, LARGE_DOUBLES = 4, 4  # small blocks, and one double block for each of four stages

# Strategy, and cfg: above 1 there is a negative prompt.
PREDICTED = {
    "one": (ParallelStrategy(), 1.0),
    "ulysses_2": (ParallelStrategy(ulysses_degree=2), 1.0),
    "ring_2": (ParallelStrategy(ring_degree=2), 1.0),
    "cfg_2": (ParallelStrategy(cfg_degree=2), 4.0),
    "pipefusion_2_exact": (ParallelStrategy(pipefusion_degree=2, warmup_steps=STEPS), 1.0),
    "pipefusion_2": (ParallelStrategy(pipefusion_degree=2), 1.0),
    "ring_in_stages": (ParallelStrategy(ring_degree=2, pipefusion_degree=2), 1.0),
    "ulysses_in_stages": (ParallelStrategy(ulysses_degree=2, pipefusion_degree=2), 1.0),
    "fsdp_2": (ParallelStrategy(ulysses_degree=2, shard_weights=True), 1.0),
    "tensor_2": (ParallelStrategy(tensor_degree=2), 1.0),
}
# Strategies whose ranks hold a part of the weights. They need few heads, so that the small model is smaller. Slices of
# tensor parallelism have no goal: they are narrower than the pages in which the kernel maps a file.
HELD = {
    "pipefusion_2": ParallelStrategy(pipefusion_degree=2),
    "pipefusion_4": ParallelStrategy(pipefusion_degree=4),
    "fsdp_2": ParallelStrategy(ring_degree=2, shard_weights=True),
    "fsdp_4": ParallelStrategy(ring_degree=4, shard_weights=True),
    "tensor_2": ParallelStrategy(tensor_degree=2),
    "tensor_4": ParallelStrategy(tensor_degree=4),
}
# Cases of networks of full_size.py: network, strategy and token mode (requests.TOKEN_MODES).
_SHARDED = ParallelStrategy(ulysses_degree=2, shard_weights=True)
FULL_SIZE = {
    "sd15_one": ("sd15", ParallelStrategy(), ROWS),
    "sd15_bands": ("sd15", ParallelStrategy(ulysses_degree=2), BANDS),
    "sd15_cfg_2": ("sd15", ParallelStrategy(cfg_degree=2), ROWS),
    "sd15_sharded": ("sd15", _SHARDED, BANDS),
    "sdxl_bands": ("sdxl", ParallelStrategy(ulysses_degree=2), BANDS),
    "sdxl_sharded": ("sdxl", _SHARDED, BANDS),
    "wan_one": ("wan", ParallelStrategy(), ROWS),
    "wan_ulysses_2": ("wan", ParallelStrategy(ulysses_degree=2), STAY),
    "wan_cfg_2": ("wan", ParallelStrategy(cfg_degree=2), ROWS),
    "wan_sharded": ("wan", _SHARDED, STAY),
}
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
HOST_GOAL, PRIVATE_GOAL, PREDICTION_GOAL = 1.15, 0.10, 0.10


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--megabytes", type=int, default=400, help="of the file that 2 and 4 ranks load")
    parser.add_argument(
        "--tokens", type=int, default=2048, choices=SIZES, help="image tokens of the predicted jobs"
    )
    parser.add_argument("--only", nargs="+", choices=sorted({*PREDICTED, *HELD, *FULL_SIZE, "host"}))
    parser.add_argument("--full-size", action="store_true", help="all private memory of ComfyUI's networks")
    parser.add_argument(
        "--host", nargs="+", type=int, default=(2, 4), help="numbers of ranks that hold one file"
    )
    parser.add_argument("--glibc", action="store_true", help="predicted jobs with glibc's own thresholds")
    args = parser.parse_args()
    known = set(FULL_SIZE) if args.full_size else {*PREDICTED, *HELD, "host"}
    if other := sorted(set(args.only or ()) - known):
        parser.error(f"{other[0]} is measured {'without' if args.full_size else 'with'} --full-size")

    def wanted(names) -> list[str]:
        return [name for name in names if args.only is None or name in args.only]

    result = {"host_growth_bytes": {}, "private_bytes_per_rank": {}, "predicted_over_measured": {}}
    if args.full_size:
        with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, GIVE_BACK):
            for name in wanted(FULL_SIZE):
                result["predicted_over_measured"][name] = _full_size(name, Path(folder))
        finish(result, args.json)
        return
    with random_flux(*MIDDLE) as middle, patch.dict(os.environ, {} if args.glibc else GIVE_BACK):
        for name in wanted(PREDICTED):
            strategy, cfg = PREDICTED[name]
            ratios = predicted_over_measured(middle, strategy, sample_request(args.tokens, STEPS, cfg))
            worst = max(ratios, key=lambda ratio: abs(ratio - 1))
            result["predicted_over_measured"][name] = round(worst, 3)
            _say(name, f"predicted / measured {worst:.3f}", abs(worst - 1) <= PREDICTION_GOAL)
    with random_flux(LARGE_HEADS, LARGE_DOUBLES, single_blocks(args.megabytes)) as large:
        size = result["file_bytes"] = Path(large.path).stat().st_size
        for ranks in args.host if wanted(["host"]) else ():
            growth = result["host_growth_bytes"][str(ranks)] = host_growth(large, ranks)
            _say(f"host, {ranks} ranks", f"{growth / size:.3f} x the file", growth <= HOST_GOAL * size)
        for name in wanted(HELD):
            strategy = HELD[name]
            held = result["private_bytes_per_rank"][name] = max(held_bytes(large, strategy))
            goal = None if strategy.tensor_degree > 1 else 1 / strategy.world_size + PRIVATE_GOAL
            met = None if goal is None else held <= goal * size
            _say(name, f"{held / size:.3f} x the file on the fullest rank", met)
    finish(result, args.json)


def _say(name: str, what: str, met: bool | None) -> None:
    print(f"{name:20s} {what:45s} {({True: 'goal met', False: 'GOAL MISSED', None: ''})[met]}", flush=True)


def predicted_over_measured(
    spec: ModelSpec, strategy: ParallelStrategy, request: SampleRequest
) -> list[float]:
    """Returns predicted over measured bytes that the job adds to each rank."""
    job = job_from_request(CheckpointModel(inspect_model(spec.path)), request)
    predicted = predict_memory(job, strategy, on_cpu=True)
    with _warm_ranks(strategy, request.cfg) as sidecar:
        before = [_anonymous(pid) for pid in sidecar.pids]
        with _peaks(sidecar.pids) as peaks:
            sidecar.sample(spec, request, Placement(strategy, "native"))
    measured = [peak - start for peak, start in zip(peaks, before, strict=True)]
    for rank, grown in zip(predicted, measured, strict=True):
        print(f"  rank {rank.rank}: {grown / 1e6:.1f} MB measured, {_added(rank) / 1e6:.1f} MB predicted")
    return [_added(rank) / grown for rank, grown in zip(predicted, measured, strict=True)]


def _full_size(name: str, folder: Path) -> float:
    kind, strategy, mode = FULL_SIZE[name]
    spec, run = full_size.write(kind, folder), full_size.sampler_run(kind)
    job = full_size.planned(spec, run)
    predicted = max(rank.private_bytes for rank in predict_memory(job, strategy, on_cpu=True))
    with ranks_on(*(f"cpu:{i}" for i in range(strategy.world_size))) as sidecar:
        sidecar.start()
        with _peaks(sidecar.pids) as peaks:
            sidecar.sample(spec, ship(spec, run, mode), Placement(strategy))
        idle = max(_anonymous(pid) for pid in sidecar.pids)
    ratio = round(predicted / max(peaks), 3)
    print(
        f"  {predicted / 1e6:.0f} MB predicted, {max(peaks) / 1e6:.0f} MB measured; {idle / 1e6:.0f} MB after the job, "
        f"{CPU_BASE_BYTES / 1e6:.0f} MB in the model for a process alone"
    )
    _say(name, f"predicted / measured {ratio:.3f}", abs(ratio - 1) <= PREDICTION_GOAL)
    return ratio


def _added(rank: RankMemory) -> int:
    """Returns the bytes that a job is predicted to add to an idle rank."""
    return rank.private_bytes - rank.base


def host_growth(spec: ModelSpec, ranks: int) -> int:
    strategy = ParallelStrategy(ring_degree=ranks)
    with _warm_ranks(strategy) as sidecar:
        before = sum(map(_proportional, sidecar.pids))
        sidecar.sample(spec, sample_request(FEW, STEPS), Placement(strategy, "native"))
        return sum(_proportional(pid) + _mapped(pid, spec.path, "Pss:") for pid in sidecar.pids) - before


def held_bytes(spec: ModelSpec, strategy: ParallelStrategy) -> list[int]:
    """Returns the bytes of weights that each rank holds."""
    with _warm_ranks(strategy) as sidecar:
        before = [_anonymous(pid) for pid in sidecar.pids]
        sidecar.sample(spec, sample_request(FEW, STEPS), Placement(strategy, "native"))
        after = [_anonymous(pid) + _mapped(pid, spec.path) for pid in sidecar.pids]
    return [now - start for now, start in zip(after, before, strict=True)]


@contextmanager
def _warm_ranks(strategy: ParallelStrategy, cfg: float = 1.0) -> Iterator[Sidecar]:
    """Yields ranks that have run a small model under `strategy` and hold nothing of it in anonymous memory."""
    heads, stages = strategy.ulysses_degree * strategy.tensor_degree, strategy.pipefusion_degree
    devices = (f"cpu:{i}" for i in range(strategy.world_size))
    with random_flux(heads, stages, stages) as small, ranks_on(*devices) as sidecar:
        sidecar.sample(small, sample_request(FEW, STEPS, cfg), Placement(strategy, "native"))
        sidecar.load(small, ParallelStrategy())  # uses the weights in place in the mapped file
        yield sidecar


def single_blocks(megabytes: int) -> int:
    """Returns how many single blocks make a file of this size. Double blocks have 36 x hidden² numbers, single 15 x."""
    square = 4 * (128 * LARGE_HEADS) ** 2  # bytes of float32
    return max(1, round((megabytes * 1e6 / square - 36 * LARGE_DOUBLES) / 15))


@contextmanager
def _peaks(pids: tuple[int, ...]) -> Iterator[list[int]]:
    """Yields the most anonymous memory of each process in bytes, which grows while the block runs."""
    most, ended = [0] * len(pids), threading.Event()

    def watch() -> None:
        while not ended.wait(SAMPLE_EVERY):
            for i, pid in enumerate(pids):
                most[i] = max(most[i], _anonymous(pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield most
    finally:
        ended.set()
        watcher.join()


def _anonymous(pid: int) -> int:
    return _kilobytes(f"/proc/{pid}/status", "RssAnon:")


def _proportional(pid: int) -> int:
    """Returns the proportional set size in bytes of memory without a file."""
    return sum(_kilobytes(f"/proc/{pid}/smaps_rollup", kind) for kind in ("Pss_Anon:", "Pss_Shmem:"))


def _kilobytes(path: str, field: str) -> int:
    """Returns in bytes a field that the kernel gives in kB."""
    lines = Path(path).read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024


def _mapped(pid: int, path: str, field: str = "Rss:") -> int:
    """Returns the sum in bytes of `field` over a process's mappings of the file whose path ends with `path`."""
    found, inside = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name, *values = line.split()
        if not name.endswith(":"):  # "7f00-7f10 r--p 0 08:01 1234  /the/file"
            inside = line.endswith(path)
        elif inside and name == field:
            found += int(values[0]) * 1024
    return found


if __name__ == "__main__":
    main()
