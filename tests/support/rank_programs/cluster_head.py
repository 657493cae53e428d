"""The head of the cluster `lab` on a separate host. It reads commands from standard input and answers in JSON."""

import json
import os
import sys

import torch

from flux_requests import request
from parallel_backend import devices
from parallel_backend.errors import ParallelError
from parallel_backend.models.registry import inspect_model
from parallel_backend.planner.plan import find_machine, job_from_request, plan_execution
from parallel_backend.planner.rules import StrategySettings
from parallel_backend.planner.workload.checkpoint_model import CheckpointModel
from parallel_backend.requests import ModelSpec, Placement
from parallel_backend.sidecar import pool
from parallel_backend.sidecar.cluster import head as clusters
from parallel_backend.wire import deadlines
from waiting import wait_until

JOB = request((10, 14), 1.0, 3, steps=12)


def answer(**fields):
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def sample(path, latent):
    """Runs a job as `auto` plans it and saves its latent to the file `latent`."""
    spec = ModelSpec(path)
    settings = StrategySettings(devices="cluster:lab")
    job = job_from_request(CheckpointModel(inspect_model(path)), JOB)
    plan = plan_execution(settings, job, find_machine(settings.devices, in_order=settings.fixes_order), None)
    answer(devices=plan.devices, strategy=plan.strategy.describe(), notes=plan.notes)
    placement = Placement(plan.strategy)
    result = pool.get_sidecar(plan.devices).sample(spec, JOB, placement, lambda step, *_: answer(step=step))
    torch.save(result.latent, latent)
    answer(done=result.info.notes)


def main():
    deadlines.SILENCE = 10.0
    clusters.serve_known()
    head = clusters.open_head("lab")
    answer(port=head.port)
    for line in sys.stdin:
        what, *words = json.loads(line)
        try:
            if what == "sample":
                sample(*words)
            elif what == "wait for":
                wait_until(lambda count=words[0]: len(head._machines) == count, 240.0)
                answer(devices=devices.resolve_devices("cluster:lab"))
            elif what == "patience":
                deadlines.MACHINES = words[0]
        except ParallelError as error:
            answer(error=f"{type(error).__name__}: {error}")
    pool.stop_all()
    clusters.close_all()
    os._exit(0)


main()
