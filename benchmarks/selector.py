"""The rule and the memory filter of `auto` against published measurements.

python benchmarks/selector.py [--data FILE.csv] [--details] [--json]

The choice is the strategy that `auto` begins a first job with, before anything is measured on a machine. The last line
with --json is one object: {"groups", "within_5pct", "mean_regret", "worst_regret", "rule_mean_regret"}.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from catalog_model import estimate_memory
from published import DATA, Group, Row, find_groups, read_rows, time_of

from parallel_backend.planner.candidates import Candidate, rank_candidates, rule_key

# Regret of choosing a strategy that ran out of memory: the run must be repeated at least once.
FAILED = 1.0


@dataclass(frozen=True)
class Outcome:
    """The choice for one group. Regret is a strategy's time divided by the best measured time, minus one."""

    group: Group
    chosen: Row
    rule: Row
    best: Row

    @property
    def regret(self) -> float:
        return self._regret(self.chosen)

    @property
    def rule_regret(self) -> float:
        return self._regret(self.rule)

    def _regret(self, row: Row) -> float:
        return FAILED if row.failed else time_of(row) / time_of(self.best) - 1


def choose(group: Group) -> Outcome:
    """Returns the choice of `auto` among the group's strategies before any measurement: by the rule, among those that
    fit into memory. `rule`: the rule's choice without regard to memory."""
    memory = max(row.memory for row in group.rows)
    entries = {}
    for row in group.rows:
        needed = estimate_memory(row.job, row.strategy).private_bytes
        entries[id(row)] = Candidate(row.strategy, needed, needed <= memory)
    ranking = rank_candidates(entries.values(), approximation="if_needed")
    chosen = next(row for row in group.rows if entries[id(row)] is ranking.best)
    rule = max(group.rows, key=lambda row: rule_key(row.strategy))
    return Outcome(group, chosen, rule, min(group.rows, key=time_of))


def summary(outcomes: list[Outcome]) -> dict[str, float | int | None]:
    regrets = [o.regret for o in outcomes]
    result = {
        "groups": len(outcomes),
        "within_5pct": mean(float(r <= 0.05) for r in regrets) if regrets else None,
        "mean_regret": mean(regrets) if regrets else None,
        "worst_regret": max(regrets, default=None),
        "rule_mean_regret": mean(o.rule_regret for o in outcomes) if outcomes else None,
    }
    return {k: round(v, 4) if isinstance(v, float) else v for k, v in result.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--details", action="store_true", help="every choice, and each row that is left out")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    rows, left_out = read_rows(args.data)
    outcomes = [choose(group) for group in find_groups(rows)]
    report(outcomes, left_out, args.details)
    if args.json:
        print(json.dumps(summary(outcomes)))


def report(outcomes: list[Outcome], left_out: list[str], details: bool) -> None:
    contested = [o for o in outcomes if o.group.contested]
    for name, some in (("all groups", outcomes), ("two or more strategies on all devices", contested)):
        if some:
            s = summary(some)
            print(
                f"{name}: {s['groups']}, within 5 % of the best {s['within_5pct']:.0%}, mean regret "
                f"{s['mean_regret']:.2%} (rule {s['rule_mean_regret']:.2%}), worst {s['worst_regret']:.1%}"
            )
    print(f"{len(left_out)} rows are left out")
    if not details:
        return
    for o in outcomes:
        print(
            f"{o.group.rows[0].label}, {o.group.count} GPUs: chose {o.chosen.strategy.describe()} "
            f"(regret {o.regret:.1%}), rule {o.rule.strategy.describe()} ({o.rule_regret:.1%}), "
            f"best {o.best.strategy.describe()}"
        )
    print("\n".join(left_out))


if __name__ == "__main__":
    main()
