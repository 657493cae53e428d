"""Bytes each rank sends per step, counted in the ranks, against the closed form (parallel_backend/engine/traffic.py).

python benchmarks/traffic.py [--json]
"""

from __future__ import annotations

import argparse

from subject import SIZES, TEXT_TOKENS, finish, random_flux, sample_request

from parallel_backend.client import Sidecar
from parallel_backend.engine.traffic import expected_bytes
from parallel_backend.requests import Placement
from parallel_backend.strategy import ParallelStrategy

TOKENS, STEPS, HEADS, DOUBLE, SINGLE = 512, 2, 4, 2, 4
STRATEGIES = (
    (ParallelStrategy(ulysses_degree=2), 1.0),
    (ParallelStrategy(ring_degree=2), 1.0),
    (ParallelStrategy(cfg_degree=2), 4.0),
    (ParallelStrategy(data_degree=2), 4.0),
    (ParallelStrategy(ulysses_degree=4), 1.0),
    (ParallelStrategy(ring_degree=4), 1.0),
    (ParallelStrategy(ring_degree=2, ulysses_degree=2), 1.0),
    (ParallelStrategy(cfg_degree=2, ulysses_degree=2), 4.0),
    (ParallelStrategy(cfg_degree=2, ring_degree=2), 4.0),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    result = {}
    with random_flux(HEADS, DOUBLE, SINGLE) as spec:
        for ranks in (2, 4):
            sidecar = Sidecar(tuple(f"cpu:{i}" for i in range(ranks)))
            try:
                for strategy, cfg in STRATEGIES:
                    if strategy.world_size == ranks:
                        result[strategy.describe()] = _measure(sidecar, spec, strategy, cfg)
            finally:
                sidecar.stop()
    for name, row in result.items():
        same = "equal" if len({str(sizes) for sizes in row["per_rank"].values()}) == 1 else "DIFFERENT"
        print(f"{name:24s} {row['measured_bytes'] / 2**20:8.3f} MiB per rank and step at most  {same}")
    finish(result, args.json)


def _measure(sidecar, spec, strategy, cfg) -> dict:
    """Bytes counted and bytes by the closed form for one step: of the busiest rank, and of each."""
    height, width = SIZES[TOKENS]
    info = sidecar.sample(spec, sample_request(TOKENS, STEPS, cfg), Placement(strategy, "native")).info
    expected = [
        expected_bytes(
            strategy,
            rank,
            rows=2 if cfg != 1.0 else 1,
            text=TEXT_TOKENS,
            image=TOKENS,
            layers=DOUBLE + SINGLE,
            hidden=128 * HEADS,
            latent_elements=16 * height * width,
        )
        for rank in range(strategy.world_size)
    ]
    measured = [sent // STEPS for sent in info.bytes_sent]
    return {
        "measured_bytes": max(measured),
        "expected_bytes": max(expected),
        "per_rank": {"measured_bytes": measured, "expected_bytes": expected},
    }


if __name__ == "__main__":
    main()
