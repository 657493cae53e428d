"""Choices of strategies and predicted speed-ups against published measurements that the cost model has not seen.

python benchmarks/selector.py [--data FILE.csv] [--details] [--constants] [--json]

Each source is predicted with constants fitted to the other sources (rows of one project count as one source), and
chosen for without its one-device time; speed-ups are predicted from its one-device time. The last line with --json is
one object: {"groups", "within_5pct", "mean_regret", "worst_regret", "rule_mean_regret", "speedup_error_median",
"speedup_error_p90"}.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from statistics import mean, median

from fit import fit, predict_seconds
from published import DATA, Group, Row, find_groups, find_one_gpu, read_rows, time_of

from parallel_backend.planner.cost.model import Constants, predict
from parallel_backend.planner.ranking import Evidence, rank_predictions, rule_key

# Regret of choosing what ran out of memory: the run has to be done again, at the least.
FAILED = 1.0


@dataclass(frozen=True)
class Outcome:
    """The choice for one group: regret is time over the best measured time, minus one."""

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


@dataclass(frozen=True)
class SpeedUp:
    """A speed-up predicted from the one-device time, and the published one."""

    row: Row
    predicted: float
    published: float

    @property
    def error(self) -> float:
        return abs(self.predicted / self.published - 1)


def constants_without(rows: list[Row]) -> dict[str, Constants]:
    """Per source family, constants fitted to all rows of the others."""
    families = {row.family_of_source for row in rows}
    return {name: fit([row for row in rows if row.family_of_source != name]) for name in families}


def choose(group: Group, constants: Constants) -> Outcome:
    """The choice among the group's measured strategies, from what is known before anything ran."""
    first = group.rows[0]
    memory = max(row.machine.memory for row in group.rows)
    machine = replace(first.machine, count=group.count, memory=memory)
    predictions = [predict(first.job, row.strategy, machine, row.constants(constants)) for row in group.rows]
    evidence = Evidence(links_measured=True)
    ranking = rank_predictions(predictions, first.job, machine, evidence, approximation="allowed")
    best = ranking.best.prediction
    chosen = next(row for row, own in zip(group.rows, predictions, strict=True) if own is best)
    rule = max(group.rows, key=lambda row: rule_key(row.strategy))
    return Outcome(group, chosen, rule, min(group.rows, key=time_of))


def predict_speedups(rows: list[Row], fitted: dict[str, Constants]) -> list[SpeedUp]:
    alone = find_one_gpu(rows)
    return [
        SpeedUp(
            row,
            alone[row.key] / predict_seconds(row, fitted[row.family_of_source], alone[row.key]),
            alone[row.key] / row.seconds,
        )
        for row in rows
        if row.gpus > 1 and row.seconds and row.key in alone
    ]


def one_gpu_errors(rows: list[Row], fitted: dict[str, Constants]) -> list[float]:
    """Relative errors of one-device times predicted from the card's peak rate, where size and steps are stated."""
    return [
        abs(predict_seconds(row, fitted[row.family_of_source], None) / row.seconds - 1)
        for row in rows
        if row.gpus == 1
        and row.seconds
        and row.stated
        and row.machine.card.known
        and row.job.model.family.known
    ]


def quantile(values: list[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed."""
    return sorted(values)[max(0, ceil(share * len(values)) - 1)]


def summary(outcomes: list[Outcome], speedups: list[SpeedUp]) -> dict[str, float | int | None]:
    regrets = [o.regret for o in outcomes]
    errors = [s.error for s in speedups]
    result = {
        "groups": len(outcomes),
        "within_5pct": mean(float(r <= 0.05) for r in regrets) if regrets else None,
        "mean_regret": mean(regrets) if regrets else None,
        "worst_regret": max(regrets, default=None),
        "rule_mean_regret": mean(o.rule_regret for o in outcomes) if outcomes else None,
        "speedup_error_median": median(errors) if errors else None,
        "speedup_error_p90": quantile(errors, 0.9) if errors else None,
    }
    return {k: round(v, 4) if isinstance(v, float) else v for k, v in result.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--details", action="store_true", help="every choice and every predicted speed-up")
    parser.add_argument("--constants", action="store_true", help="only fit the constants to all rows")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    rows, left_out = read_rows(args.data)
    if args.constants:
        print(fit(rows))
        return
    # A file of new rows is predicted with what the published ones teach, its own source always left out.
    teaching = rows if args.data.resolve() == DATA.resolve() else rows + read_rows(DATA)[0]
    fitted = constants_without(teaching)
    outcomes = [choose(group, fitted[group.rows[0].family_of_source]) for group in find_groups(rows)]
    speedups = predict_speedups(rows, fitted)
    report(outcomes, speedups, left_out, args.details)
    if alone := one_gpu_errors(rows, fitted):
        print(
            f"one-device time from the peak rate: {len(alone)} rows, median error {median(alone):.1%}, "
            f"p90 {quantile(alone, 0.9):.1%}"
        )
    if args.json:
        print(json.dumps(summary(outcomes, speedups)))


def report(outcomes: list[Outcome], speedups: list[SpeedUp], left_out: list[str], details: bool) -> None:
    contested = [o for o in outcomes if o.group.contested]
    for name, some in (("all groups", outcomes), ("two or more strategies on all devices", contested)):
        if some:
            s = summary(some, [])
            print(
                f"{name}: {s['groups']}, within 5 % of the best {s['within_5pct']:.0%}, mean regret "
                f"{s['mean_regret']:.2%} (rule {s['rule_mean_regret']:.2%}), worst {s['worst_regret']:.1%}"
            )
    tables = defaultdict(list)
    for s in speedups:
        kind = s.row.machine.link.kind
        where = {"nvlink": "NVLink", "pcie": "PCIe", "host": "PCIe without peer access"}.get(kind, kind)
        tables[f"{s.row.gpus} GPUs, {where}"].append(s.error)
        tables["all"].append(s.error)
    for name, errors in sorted(tables.items()):
        print(
            f"speed-up error, {name}: {len(errors)} rows, median {median(errors):.1%}, "
            f"p90 {quantile(errors, 0.9):.1%}"
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
    for s in sorted(speedups, key=lambda s: -s.error):
        print(
            f"{s.row.label}: {s.row.strategy.describe()}: predicted {s.predicted:.2f}, published "
            f"{s.published:.2f} ({s.predicted / s.published - 1:+.0%})"
        )
    print("\n".join(left_out))


if __name__ == "__main__":
    main()
