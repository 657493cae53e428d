"""`python -m parallel_backend doctor`: examines the installation and the machine, and says how to fix what is wrong."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ..devices import cluster_of, is_cpu, name_devices, resolve_devices
from ..errors import RequestError
from .bench.command import DEFAULT_ROUNDS
from .doctor.report import say_progress

if TYPE_CHECKING:
    from ..wire.checks.findings import CheckSubject

_WIDTHS = (80, 100)  # columns, least and most: a bug report shows 100 without a scroll bar


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--devices",
        default="",
        help="'0,1', 'all', 'cpu:2' or 'cluster:NAME'; all GPUs if not given, or two processes on the CPU",
    )
    # The process that the doctor ends with: ComfyUI, if its button started it. The ranks end with the doctor likewise.
    parser.add_argument("--parent", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the text")
    gpu = parser.add_argument_group("the GPU check (docs/gpu-check.md)")
    gpu.add_argument(
        "--gpu", action="store_true", help="try everything that a GPU is for, and write a report"
    )
    gpu.add_argument("--model", default="", help="a .safetensors file of Flux.1; the demo model if not given")
    gpu.add_argument("--only", action="append", default=[], metavar="NAME", help="one check or group; repeat")
    gpu.add_argument("--report", default=".", metavar="FOLDER", help="where the report goes; this folder")
    gpu.add_argument(
        "--share",
        default="",
        metavar="FILE",
        help="measure strategies too: a small result to send in (docs/results.md)",
    )


def run(args: argparse.Namespace) -> int:
    """Prints the report; returns 1 if something is broken, else 0. Raises DeviceError for devices that do not exist."""
    if args.parent:
        from ..wire.parent_death import die_with_parent

        die_with_parent(args.parent)
    from .doctor.devices import numbered, resolve_for_command
    from .doctor.examine import examine

    devices: tuple[str, ...] = ()
    if args.devices:
        if args.gpu and (cluster := cluster_of(args.devices)):
            raise RequestError(
                f"--gpu with devices of the cluster {cluster}: the GPU check looks at the GPUs of one computer. Run it "
                f"on each machine, and `doctor --devices cluster:{cluster}` here for what lies between them."
            )
        devices = resolve_for_command(args.devices)
        # The report can be shown to others, so it has numbers only.
        for machine, called in numbered(devices).items():
            sys.stderr.write(f"{called}: {machine}\n")
    if args.gpu:
        return _run_gpu_check(args, devices)
    if args.share:
        raise RequestError(
            "--share measures with the GPU check; add --gpu, or use bench --share with a model of yours."
        )
    report = examine(devices, on_phase=_tell_parent if args.parent and args.json else say_progress)
    if args.json:
        sys.stdout.write(json.dumps(report.as_dict()) + "\n")
    else:
        width = min(max(shutil.get_terminal_size().columns, _WIDTHS[0]), _WIDTHS[1])
        sys.stdout.write(report.as_text(width) + "\n")
    return report.exit_status


def _run_gpu_check(args: argparse.Namespace, devices: tuple[str, ...]) -> int:
    """Prints a line per check and writes the report after each, so that a killed run leaves the results so far."""
    from .bench.shared import path_to_share
    from .doctor.examine import TWO_ON_CPU
    from .gpu_check.run import FILES, GpuReport, choose, make_subject, run_checks

    folder = Path(args.report)
    if not folder.is_dir():
        raise RequestError("--report names no folder; make it first, or leave the option out.")
    shared = path_to_share(args.share)
    progress = sys.stderr if args.json else sys.stdout

    def say(line: str) -> None:
        progress.write(f"{line}\n")
        progress.flush()

    def on_report(report: GpuReport) -> None:
        report.write(folder)
        for verdict in report.results[-1].verdicts:
            say(f"  {verdict.status:8s}{verdict.name}: {' '.join(verdict.finding.split())}")

    if not devices:
        usual = resolve_devices("all")  # also a single GPU
        devices = TWO_ON_CPU if is_cpu(usual) else usual
    subject = make_subject(devices, args.model)
    report = run_checks(
        subject,
        choose(args.only),
        on_begin=lambda name, number, count: say(f"[{number}/{count}] {name} …"),
        on_report=on_report,
    )
    if args.json:
        sys.stdout.write(json.dumps(report.as_dict()) + "\n")
    else:
        sys.stdout.write(
            f"\n{report.summary}\nThe report is in {' and '.join(FILES)}: attach it to a bug as it is.\n"
        )
    if shared is not None:
        say("measuring strategies …")
        _share(subject, shared)
    return report.exit_status


def _share(subject: CheckSubject, path: Path) -> None:
    """Measures one device and all strategies that use every device, with the picture size of the check."""
    from .bench.measure import measure
    from .bench.shared import share

    outcome = measure(
        model=subject.model,
        devices=name_devices(subject.devices),
        width=subject.pixels,
        height=subject.pixels,
        text=subject.text,
        steps=subject.steps,
        rounds=DEFAULT_ROUNDS,
        with_cfg=True,
    )
    share(outcome, path)


def _tell_parent(text: str) -> None:
    """Prints the phase as a line of JSON, before the line of the report."""
    sys.stdout.write(json.dumps({"phase": text}) + "\n")
    sys.stdout.flush()
