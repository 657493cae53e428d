"""Decoding one image in bands: 2 ranks x 1 thread against 1 rank x 1 thread, with the same random VAE of Flux's kind.

    python benchmarks/vae_decode.py [--width 128] [--sizes 32x32 64x48] [--rounds 3] [--json]

efficiency: t(1) / (2 * t(2)), medians of interleaved runs, time inside the ranks;
cpu_efficiency: one rank's processor time over that of both ranks, which does not count waiting and other programs;
difference: the largest difference of any pixel, over the largest pixel;
sent_bytes, expected_bytes: of each rank, counted, and by the closed form (tests/closed_forms/band_traffic.py);
peak_bytes: peak growth of each rank's resident memory during a decode (fresh ranks, weights already touched).
Sizes are latent rows x columns, an eighth of the image's.
"""

from __future__ import annotations

import os
from pathlib import Path
from statistics import median

from subject import finish, make_parser, ranks_on

from parallel_backend.layout import split_sizes
from parallel_backend.sidecar.sidecar import Sidecar
from tests.closed_forms.band_traffic import expected_decode_bytes
from tests.closed_forms.vae_sizes import VaeSizes
from tiny_vae import random_latent, random_vae
from vae_halves import Half


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--width", type=int, default=128, help="channels of the finest of its four levels")
    parser.add_argument("--sizes", nargs="+", default=["32x32", "64x48"])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()

    sizes = VaeSizes(width=args.width)
    vae = Half(random_vae(sizes), sizes.channels, dims=2)
    result = {}
    for size in args.sizes:
        height, width = map(int, size.split("x"))
        latent = random_latent(sizes, height, width)
        row = _times(vae, latent, args.rounds)
        row["expected_bytes"] = [
            expected_decode_bytes(sizes, split_sizes(height, 2), rank, width=width) for rank in (0, 1)
        ]
        row["peak_bytes"] = {ranks: _peak(vae, sizes, latent, ranks) for ranks in (1, 2)}
        result[size] = row
        same = "equal" if row["expected_bytes"] == row["sent_bytes"] else "DIFFERENT"
        peaks = [max(row["peak_bytes"][ranks]) / 2**20 for ranks in (1, 2)]
        print(
            f"{size:>9s}  1 rank {row['seconds']['1']:7.2f} s  2 ranks {row['seconds']['2']:7.2f} s  efficiency "
            f"{row['efficiency']:.3f} (processor time {row['cpu_efficiency']:.3f})  difference "
            f"{row['difference']:.1e}  sent {max(row['sent_bytes']) / 2**20:.2f} MiB ({same})  peak {peaks[0]:.0f} and "
            f"{peaks[1]:.0f} MiB"
        )
    finish(result, args.json)


def _times(vae: Half, latent, rounds: int) -> dict:
    times: dict[str, list[float]] = {"1": [], "2": []}
    processor: dict[str, list[float]] = {"1": [], "2": []}
    with ranks_on("cpu:0") as one, ranks_on("cpu:0", "cpu:1") as two:
        for round_number in range(rounds + 1):
            before = _processor_seconds(one), _processor_seconds(two)
            single, double = one.call_module(vae.request(latent)), two.call_module(vae.request(latent))
            if round_number:  # the first round warms up
                times["1"].append(single.seconds)
                times["2"].append(double.seconds)
                processor["1"].append(_processor_seconds(one) - before[0])
                processor["2"].append(_processor_seconds(two) - before[1])
    seconds = {ranks: median(values) for ranks, values in times.items()}
    difference = (double.value - single.value).abs().max() / single.value.abs().max()
    return {
        "seconds": seconds,
        "efficiency": round(seconds["1"] / (2 * seconds["2"]), 3),
        "cpu_efficiency": round(median(processor["1"]) / median(processor["2"]), 3),
        "difference": difference.item(),
        "sent_bytes": list(double.bytes_sent),
    }


def _processor_seconds(sidecar: Sidecar) -> float:
    """Returns the user and system time of all ranks since they started, in seconds."""
    ticks = 0
    for pid in sidecar.pids:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(words[11]) + int(words[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def _peak(vae: Half, sizes: VaeSizes, latent, ranks: int) -> list[int]:
    """Returns the peak growth of each rank's resident memory during a decode, in bytes."""
    with ranks_on(*(f"cpu:{rank}" for rank in range(ranks))) as sidecar:
        sidecar.call_module(vae.request(random_latent(sizes, ranks, 1)))
        before = []
        for pid in sidecar.pids:
            Path(f"/proc/{pid}/clear_refs").write_text("5")  # resets VmHWM, the highest value so far
            before.append(_status(pid, "VmRSS"))
        sidecar.call_module(vae.request(latent))
        return [_status(pid, "VmHWM") - rss for pid, rss in zip(sidecar.pids, before, strict=True)]


def _status(pid: int, name: str) -> int:
    """Returns one field of /proc/PID/status in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    main()
