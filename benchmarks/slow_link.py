"""Measures how much of its exchanges Ulysses 2 hides behind computing, over an artificially slow link.

python benchmarks/slow_link.py [--share 0.3] [--tokens 4096] [--rounds 3] [--json]

Two processes with one thread each compute a Flux with random weights. The link between them is simulated: gloo carries
the bytes, and an all-to-all ends when they would have crossed a link with a given number of bytes per second. Exchanges
use the link one after the other, while both processes compute. Its speed is set so that a step's exchanges take `share`
of the step's computing; `link_error` says how far one exchange alone is from that speed.
hidden: the share of the exchanges' time for which the step does not wait, relative to a link without a limit, on which
gloo takes some time as well; against_first: a step's time divided by that with all heads in one exchange.
"""

from __future__ import annotations

import time
from itertools import pairwise
from statistics import median

import torch
import torch.distributed as dist
from subject import finish, make_parser, random_flux, sample_request

from parallel_backend.engine.attention import sequence
from parallel_backend.engine.comm.groups import Layouts, World
from parallel_backend.strategy import ParallelStrategy
from plain_jobs import PlainJobs
from ranks import run_ranks

ULYSSES = ParallelStrategy(ulysses_degree=2)
WAYS = tuple(
    ULYSSES.replace(head_groups=groups, sends_tokens=tokens)
    for groups, tokens in ((1, False), (2, False), (4, False), (1, True), (2, True), (4, True))
)
HEADS, DOUBLE, SINGLE = 8, 1, 1
STEPS = 3  # of a job; the first one is not timed
ALONE = 2**22  # elements that a rank sends to the other one in the exchange that checks the link's speed


class SlowLink:
    """A link that sends this rank's exchanges one after the other. `bytes_per_second`: 0 for a link without a limit."""

    def __init__(self, carry) -> None:
        self._carry = carry
        self.bytes_per_second = 0.0
        self._free_at = 0.0

    def start(self, send, send_sizes, receive_sizes, axis, *, overlaps=True):
        """Replaces collectives.start_all_to_all."""
        before = axis.traffic.bytes_sent
        arrive = self._carry(send, send_sizes, receive_sizes, axis, overlaps=overlaps)
        there = 0.0
        if self.bytes_per_second:
            begin = max(time.perf_counter(), self._free_at)
            there = self._free_at = begin + (axis.traffic.bytes_sent - before) / self.bytes_per_second

        def arrived():
            received = arrive()
            time.sleep(max(0.0, there - time.perf_counter()))
            return received

        return arrived


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--share", type=float, default=0.3)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()

    with random_flux(HEADS, DOUBLE, SINGLE) as spec:
        found, *_ = run_ranks(
            _measure, 2, spec.path, args.tokens, args.share, args.rounds, timeout=3600, backend="gloo"
        )
    link, sent = found["link"], found["bytes"]
    print(
        f"{args.tokens} tokens, {HEADS} heads: a step exchanges {sent[0] / 2**20:.0f} MiB from each process, which "
        f"takes the link {sent[0] / link:.3f} s at {link / 2**20:.0f} MiB/s (one exchange alone: "
        f"{found['link_error']:+.1%})"
    )
    result = {"exchange_s": round(sent[0] / link, 4), "link_error": round(found["link_error"], 4)}
    slow, free = (list(map(median, found[name])) for name in ("slow", "free"))
    for way, bytes_sent, slow_s, free_s in zip(WAYS, sent, slow, free, strict=True):
        hidden = 1 - (slow_s - free_s) * link / bytes_sent
        result[way.describe()] = {
            "bytes": round(bytes_sent / sent[0], 3),
            "free_s": round(free_s, 4),
            "slow_s": round(slow_s, 4),
            "hidden": round(hidden, 3),
            "against_first": round(slow_s / slow[0], 3),
        }
        print(
            f"{way.describe():42s} {bytes_sent / sent[0]:.2f} of the bytes; a step takes {slow_s:.3f} s, {free_s:.3f} "
            f"s on a link without a limit; hidden {hidden:.0%}; {slow_s / slow[0]:.2f} of the first one's step"
        )
    finish(result, args.json)


def _measure(world: World, path: str, tokens: int, share: float, rounds: int) -> dict:
    """Runs in each of the two processes. Returns seconds of steps of each way on both links, measured in turns."""
    link = SlowLink(sequence.start_all_to_all)
    sequence.start_all_to_all = link.start
    layouts = Layouts(world)
    axis = layouts.get(ULYSSES).ulysses
    jobs, request = PlainJobs(layouts), sample_request(tokens, STEPS)

    def steps(way: ParallelStrategy, bytes_per_second: float) -> list[float]:
        link.bytes_per_second, ends = bytes_per_second, []
        jobs.run(path, way, request, boundary=lambda *_: ends.append(time.perf_counter()))
        return [after - before for before, after in pairwise(ends)]

    sent = []
    for way in WAYS:
        steps(way, 0.0)
        before = layouts.traffic.bytes_sent
        steps(way, 0.0)
        sent.append((layouts.traffic.bytes_sent - before) / STEPS)
    computing = torch.tensor(median(steps(ULYSSES, 0.0)))
    dist.all_reduce(computing, op=dist.ReduceOp.MAX, group=axis.group)  # both get the same link
    speed = sent[0] / (share * computing.item())
    link.bytes_per_second = speed
    send = torch.zeros(2 * ALONE)
    begin = time.perf_counter()
    link.start(send, (ALONE, ALONE), (ALONE, ALONE), axis)()
    error = (time.perf_counter() - begin) / (4 * ALONE / speed) - 1
    found: dict = {"bytes": sent, "link": speed, "link_error": error}
    found |= {name: [[] for _ in WAYS] for name in ("free", "slow")}
    for _ in range(rounds):
        for number, way in enumerate(WAYS):
            found["free"][number] += steps(way, 0.0)
            found["slow"][number] += steps(way, speed)
    return found


if __name__ == "__main__":
    main()
