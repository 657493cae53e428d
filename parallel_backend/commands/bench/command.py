"""`python -m parallel_backend bench`: compares strategies on your own model and devices, in a table and a picture."""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from ...errors import RequestError

DEFAULT_ROUNDS = 3
JSON_NAME, CHART_NAME = "bench.json", "bench.png"
_MOST_PIXELS = 8192  # per side
# Options that are passed on as they are; numbers are at least 1.
_NUMBERS = ("steps", "rounds", "batch", "text")
_TEXTS = ("model", "devices", "strategies", "engine", "weight_dtype")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="a Flux.1 checkpoint (.safetensors)")
    parser.add_argument("--devices", default="all", help="'all', '0,1', 'cpu:2' or 'cluster:NAME'")
    parser.add_argument("--size", default="1024x1024", help="WIDTHxHEIGHT in pixels")
    parser.add_argument("--steps", type=int, default=4, help="denoising steps of each run")
    parser.add_argument("--rounds", type=int, default=DEFAULT_ROUNDS, help="runs of each strategy that count")
    parser.add_argument("--batch", type=int, default=1, help="images at once")
    parser.add_argument("--text", type=int, default=512, help="text tokens")
    parser.add_argument(
        "--cfg", choices=("on", "off"), default="off", help="on: a negative prompt is evaluated"
    )
    parser.add_argument(
        "--strategies",
        default="",
        help="such as one,ulysses2,cfg2xring2; if not given: one device, and all that occupy every device; "
        "'all': also those on fewer devices",
    )
    parser.add_argument("--engine", choices=("auto", "native", "xfuser"), default="auto")
    parser.add_argument(
        "--weight-dtype", default="auto", help="storage of the weights, as in the loader node"
    )
    parser.add_argument("--out", default="parallel-bench", help=f"folder for {JSON_NAME} and {CHART_NAME}")
    parser.add_argument(
        "--share", default="", metavar="FILE", help="a small result to send in (docs/results.md)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")


def run(args: argparse.Namespace) -> int:
    """Measures, prints and writes; returns 1 if no strategy ran. Raises ParallelError for what cannot be measured."""
    from .measure import measure
    from .report import as_text, can_draw, draw
    from .shared import path_to_share, share

    width, height = _size(args.size)
    for name in _NUMBERS:
        if getattr(args, name) < 1:
            raise RequestError(f"{name} {getattr(args, name)}: it must be at least 1.")
    out = Path(args.out).expanduser()
    try:  # fail now rather than after minutes of measuring
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(f"out {args.out!r} cannot be made a folder: {error.strerror}.") from None
    shared = path_to_share(args.share)
    chosen = {name: getattr(args, name) for name in (*_NUMBERS, *_TEXTS)}
    outcome = measure(**chosen, width=width, height=height, with_cfg=args.cfg == "on")
    written, missing = str(out / JSON_NAME), ""
    (out / JSON_NAME).write_text(json.dumps(outcome.as_dict(), indent=1) + "\n")
    if outcome.best is not None and can_draw():
        draw(outcome, out / CHART_NAME)
        written += f", {out / CHART_NAME}"
    elif outcome.best is not None:
        missing = "No picture: matplotlib is not installed (pip install matplotlib).\n"
    sys.stdout.write((json.dumps(outcome.as_dict()) if args.json else as_text(outcome)) + "\n")
    (sys.stderr if args.json else sys.stdout).write(f"Written: {written}.\n{missing}")
    if shared is not None and outcome.best is not None:
        share(outcome, shared)
    return int(outcome.best is None)


def _size(text: str) -> tuple[int, int]:
    size = re.fullmatch(r"(\d{2,5})[x×](\d{2,5})", text.strip().lower())
    if not size or max(int(size[1]), int(size[2])) > _MOST_PIXELS:
        raise RequestError(
            f"size {text!r} is not understood; write WIDTHxHEIGHT, such as 1024x1024, {_MOST_PIXELS} at most."
        )
    return int(size[1]), int(size[2])
