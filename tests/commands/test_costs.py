"""The table of a log: sums by model, prompt and day, failed and idle time apart, and what is no line of it told."""

from __future__ import annotations

import json

import pytest

from parallel_backend.__main__ import main
from parallel_backend.commands.costs import COLUMNS
from parallel_backend.observability.logs.event_log import VARIABLE, begin_log
from parallel_backend.requests import ModelSpec
from parallel_backend.sidecar.group.events import Ended, Released, Started, emit
from parallel_backend.strategy import ParallelStrategy

FLUX, WAN = ModelSpec("/models/flux.safetensors"), ModelSpec("C:\\models\\wan.safetensors")
TWO, ULYSSES, CFG = ("cuda:0", "cuda:1"), ParallelStrategy(ulysses_degree=2), ParallelStrategy(cfg_degree=2)


def _sampled(result, seconds, strategy, images, spec, prompt, idle_s=0.0):
    return Ended(TWO, "sample", result, seconds, None, None, strategy, images, spec, prompt, idle_s)


@pytest.fixture
def log(tmp_path):
    """As a ComfyUI wrote it whose devices cost 7.2 an hour: 0.002 a second."""
    path = tmp_path / "ranks.jsonl"
    end = begin_log({VARIABLE: str(path)}, price=lambda: 7.2)
    for event in (
        Started(TWO, 3.0, ""),
        _sampled("done", 5.0, ULYSSES, 2, FLUX, "one", idle_s=20.0),
        _sampled("failed", 1.0, ULYSSES, 1, FLUX, "two"),
        _sampled("done", 4.0, ULYSSES, 1, FLUX, "two"),
        _sampled("done", 50.0, CFG, 1, WAN, "three"),
        Ended(TWO, "predict", "done", 0.5, None, None, CFG, 0, WAN, "four"),
        Ended(TWO, "decode", "done", 0.25, None, None, None, 1, None, "one"),
        Released(TWO, 30.0),
    ):
        emit(event)
    end()
    return path


def _json(capsys, *arguments):
    assert main(["costs", *map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_models_and_strategies_have_a_row_each_with_what_failed_and_waited_apart(log, capsys):
    found = _json(capsys, log)
    rows = {(row["key"]["model"], row["key"]["strategy"]): row for row in found["rows"]}
    assert list(rows) == [
        ("wan.safetensors", "CFG 2"),
        ("flux.safetensors", "Ulysses 2"),
        ("–", "–"),  # a decode
        ("idle", ""),
    ]
    flux = rows["flux.safetensors", "Ulysses 2"]
    assert (flux["images"], flux["done"], flux["failed"]) == (3, 18.0, 2.0)
    assert flux["cost"] == pytest.approx(20 * 0.002)
    assert rows["idle", ""]["idle"] == 100.0
    total = found["total"]
    assert (total["images"], total["done"], total["failed"], total["idle"]) == (5, 119.5, 2.0, 100.0)
    assert total["cost"] == pytest.approx(121.5 * 0.002)


def test_a_prompt_has_its_own_rows_and_another_price_counts_for_waiting_too(log, capsys):
    rows = {
        row["key"]["prompt"]: row for row in _json(capsys, log, "--by", "prompt", "--price", 3600)["rows"]
    }
    assert (rows["two"]["images"], rows["two"]["cost"]) == (1, 10.0)
    assert (rows["four"]["images"], rows["four"]["cost"]) == (0, 1.0)
    assert rows["idle"]["cost"] == 100.0


def test_a_day_is_chosen_and_several_files_are_one_log(log, tmp_path, capsys):
    older = tmp_path / "ranks.jsonl.1"
    ended = {"time": "2020-02-29T23:59:59.999Z", "event": "ended", "result": "done", "device_seconds": 8}
    older.write_text(json.dumps(ended) + "\n")
    rows = _json(capsys, log, older, "--by", "day")["rows"]
    assert len(rows) == 3 and rows[1]["key"] == {"day": "2020-02-29"}
    (row,) = _json(capsys, log, older, "--by", "day", "--day", "2020-02-29")["rows"]
    assert (row["done"], row["cost"]) == (8.0, None)
    assert _json(capsys, log, "--day", "1999-01-01")["rows"] == []


def test_the_table_is_read_by_a_person(log, capsys):
    assert main(["costs", str(log)]) == 0
    head, *rows, total = capsys.readouterr().out.splitlines()
    assert head.split() == ["model", "strategy", *" ".join(COLUMNS).split()]
    assert next(row for row in rows if row.startswith("flux")).split()[-7:] == (
        ["3", "18.0", "2.0", "0.0", "6.67", "0.04", "0.0133"]
    )
    assert total.split()[:2] == ["total", "5"] and len({len(row) for row in (head, total)}) == 1


def test_what_is_no_line_of_the_log_is_told_and_costs_nothing(tmp_path, capsys):
    path = tmp_path / "damaged.jsonl"
    odd = [
        b'{"event": "ended", "time": 7, "device_seconds": "x", "images": null, "result": []}',
        b'{"event": "ended", "device_seconds": NaN, "idle_device_seconds": -3, "cost": true}',
        b"[1]",
        b"{",
        b"[" * 100_000,
        b"\xff\xfe",
        b"",
    ]
    path.write_bytes(b"\n".join(odd))
    assert main(["costs", str(path), "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["damaged"] == 4 and json.loads(out)["total"]["done"] == 0
    assert err.startswith("4 lines") and "line 3" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere.jsonl"], VARIABLE),
        (["-", "--day", "yesterday"], "2026-11-21"),
        (["-", "--price", "-1"], "0 or more"),
        (["-", "--price", "nan"], "0 or more"),
    ],
)
def test_what_makes_no_sense_is_refused_in_words(arguments, words, capsys):
    assert main(["costs", *arguments]) == 2
    assert words in capsys.readouterr().err
