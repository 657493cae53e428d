"""The doctor as a whole: its report's form, its privacy, its probes, and real runs on two CPU ranks."""

import getpass
import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from parallel_backend.__main__ import main
from parallel_backend.commands.doctor import examine as examination
from parallel_backend.commands.doctor import probes, rank_probe
from parallel_backend.commands.doctor.report import Private, Report, find_private, scrub, scrub_findings
from parallel_backend.commands.doctor.versions import check_classes
from parallel_backend.machine.self_tests import SelfTestStore
from parallel_backend.models.proof.installed import VARIABLE as COMFYUI
from parallel_backend.models.proof.states import entry_digest
from parallel_backend.models.tokens.table import TABLE
from parallel_backend.planner.history import open_history
from parallel_backend.requests import BLOCK
from parallel_backend.sidecar.sidecar import Sidecar
from parallel_backend.wire import cache_folder
from parallel_backend.wire.checks.findings import Finding, SelfTest
from tiny_flux import write_tiny_flux

ROOT = Path(__file__).resolve().parents[3]
OK = Finding("torch", "ok", "2.13.0", group="Software")
BROKEN = Finding(
    "all-reduce", "broken", "a wrong sum " * 12, "do this " * 20, ("  a table's row", "another"), "Links"
)


# The report's form.


@pytest.mark.parametrize("width", [80, 100])
def test_the_text_fits_a_terminal_and_says_a_remedy_for_what_is_wrong(width):
    text = Report((OK, BROKEN)).as_text(width)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert lines[0] == "Software" and lines[1].split() == ["ok", "torch", "2.13.0"]
    assert any(line.strip().startswith("→ do this") for line in lines)
    assert any("a table's row" in line for line in lines)
    assert "1 ok, 1 broken" in text


def test_the_exit_status_is_1_only_where_something_is_broken():
    slow = Finding("peer access", "slow", "none")
    assert Report((OK, slow)).exit_status == 0 and Report((OK, BROKEN)).exit_status == 1
    assert Report((OK, BROKEN)).as_dict()["counts"] == {"ok": 1, "slow": 0, "broken": 1, "skipped": 0}


# Nothing private.


def test_paths_names_and_serial_numbers_are_taken_out():
    private = Private(
        (("/opt/comfy/pack", "<pack>"), ("/data/jo", "~")), (("bigbox", "<host>"), ("jo", "<user>"))
    )
    text = (
        "/opt/comfy/pack/a.py by jo at bigbox:8188, /data/jo/models/x.safetensors, /home/ann/.cache, "
        "GPU-5a1b2c3d-0000-1111-2222-333344445555, jolly, /opt/comfy/packs"
    )
    clean = scrub(text, private)
    assert clean == (
        "<pack>/a.py by <user> at <host>:8188, ~/models/x.safetensors, ~, GPU-…, jolly, /opt/comfy/packs"
    )


def test_this_process_names_are_found(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "jdoe"))
    monkeypatch.setenv("USER", "jdoe")
    monkeypatch.setenv("LOGNAME", "jdoe")
    monkeypatch.setattr(socket, "gethostname", lambda: "bigbox.example.org")
    text = f"{tmp_path}/jdoe/ComfyUI/x.py, {ROOT}/parallel_backend/rank.py, jdoe, bigbox.example.org, bigbox"
    (clean,) = scrub_findings([Finding("b", "broken", text, text, (text,))], find_private())
    for shown in (clean.finding, clean.remedy, *clean.details):
        assert shown == "~/ComfyUI/x.py, <pack>/parallel_backend/rank.py, <user>, <host>, <host>"


# Probes.


def test_a_missing_folder_of_shared_memory_is_told():
    assert probes.probe_system(Path("/nowhere")).shm is None


def test_models_are_found_by_their_headers_and_none_is_named(monkeypatch, tmp_path):
    folder = tmp_path / "models" / "diffusion_models"
    folder.mkdir(parents=True)
    (tmp_path / "comfy").mkdir()
    (tmp_path / "comfy" / "cli_args.py").touch()
    monkeypatch.setenv("COMFYUI_PATH", str(tmp_path))
    for name, blocks in (("a", 2), ("b", 3), ("c", 4), ("again", 4)):
        write_tiny_flux(folder / f"{name}.safetensors", double_blocks=blocks, single_blocks=2)
    (folder / "damaged.safetensors").write_bytes(b"no header")
    (folder / "gone.safetensors").symlink_to(tmp_path / "nowhere")
    assert probes.probe_models() == [(6, 256), (5, 256)]
    monkeypatch.setenv("COMFYUI_PATH", str(tmp_path / "nowhere"))
    assert probes.probe_models() == []


def test_classes_of_models_whose_code_is_new_are_named_until_they_are_tested(monkeypatch, tmp_path):
    monkeypatch.setenv(cache_folder.VARIABLE, str(tmp_path / "kept"))
    root = tmp_path / "ComfyUI"
    monkeypatch.setenv(COMFYUI, str(root))
    assert probes.probe_classes() is None
    for name in (TABLE["LTXVModel"].source, "comfy/ldm/modules/attention.py", "comfy/cli_args.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("import torch\n")
    new = check_classes(*probes.probe_classes())
    assert new.details == ("LTXVModel",) and new.status == "ok"
    once = ": 1 kinds of models have new code; each is tested once, 10 to 20 s, before it first runs"
    assert once in new.finding
    SelfTestStore().keep(entry_digest(str(root), "LTXVModel"), SelfTest("LTXVModel", BLOCK, 0.3))
    known = check_classes(*probes.probe_classes())
    assert known.finding.endswith("compute as the pack knows them") and not (known.details or known.remedy)


def _process(proc, pid, arguments, parent):
    entry = proc / str(pid)
    entry.mkdir(parents=True)
    (entry / "cmdline").write_bytes(b"\0".join(a.encode() for a in arguments) + b"\0")
    (entry / "stat").write_text(f"{pid} (python (x) y) S {parent} 1 1 0")


def test_ranks_without_their_parent_are_found(tmp_path):
    proc = tmp_path / "proc"
    rank = ["python", "-m", "parallel_backend.rank", "--fd", "5", "--parent"]
    _process(proc, 100, ["python", "main.py"], 1)
    _process(proc, 101, [*rank, "100"], 100)  # at work
    _process(proc, 102, [*rank, "99"], 1)  # its parent has ended
    _process(proc, 103, [*rank, "99"], 50)  # likewise, and a subreaper adopted it
    _process(proc, 105, [*rank, "1"], 1)  # no orphan: ComfyUI is process 1 of a container
    _process(proc, 104, ["grep", "parallel_backend.rank"], 1)
    (proc / "self").mkdir()
    assert probes.probe_leftovers(proc) == [102, 103]


# Whole runs.


def test_a_good_installation_passes_and_the_report_can_be_shared(no_leaks, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(cache_folder.VARIABLE, str(tmp_path))
    monkeypatch.setattr(rank_probe, "LINKS_S", 3.0)
    status = main(["doctor", "--devices", "cpu:2", "--json"])
    said = capsys.readouterr().out
    report = json.loads(said)
    statuses = {v["name"]: v["status"] for v in report["verdicts"]}
    assert status == report["exit_status"] == 0, said
    examined = {"torch", "diffusers", "in use", "same latent"}
    examined |= {"all-reduce", "data", "bandwidth", "worth an image", "worth a video"}  # of the links
    assert {statuses[name] for name in examined} <= {"ok", "slow"}, statuses
    parity = next(v["finding"] for v in report["verdicts"] if v["name"] == "same latent")
    assert "Ulysses 2, Ring 2, CFG 2" in parity and "float32" in parity
    matrix = next(v["details"] for v in report["verdicts"] if v["name"] == "bandwidth")
    assert len(matrix) == 3
    link = open_history(("cpu:0", "cpu:1")).link(2)
    assert link.bytes_per_second > 0 < link.latency_s, "what a run's report compares with"
    for private in (socket.gethostname(), str(Path.home()), str(ROOT), f"{getpass.getuser()} "):
        assert private not in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--devices", "99"], "99"),
        (["--share", "result.json"], "add --gpu"),
        (["--gpu", "--devices", "cpu:2", "--report", "/nowhere"], "names no folder"),
        (["--gpu", "--devices", "cluster:lab"], "on each machine, and `doctor --devices cluster:lab`"),
        (["--gpu", "--devices", "cuda:0@lab/a"], "on each machine, and `doctor --devices cluster:lab`"),
    ],
)
def test_what_it_cannot_do_is_refused_before_it_begins(arguments, words, capsys):
    assert main(["doctor", *arguments]) == 2
    said = capsys.readouterr()
    assert words in said.err and said.out == ""


def test_it_runs_where_torch_is_missing_and_says_so():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import importlib.metadata as m; real = m.version\n"
        "def version(name):\n"
        "    if name == 'torch': raise m.PackageNotFoundError(name)\n"
        "    return real(name)\n"
        "m.version = version\n"
        "from parallel_backend.__main__ import main; sys.exit(main(['doctor']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stderr
    assert re.search(r"broken +torch +is not installed", done.stdout)
    assert "cannot start without what is missing" in done.stdout


def test_one_whose_parent_is_gone_does_nothing():
    """Where the parent ends later: tests/comfy/test_other_comfyui.py."""
    command = [sys.executable, "-m", "parallel_backend", "doctor", "--parent", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, b"")


@pytest.mark.real_start
def test_ranks_that_cannot_start_are_one_broken_line(no_leaks, monkeypatch):
    monkeypatch.setitem(
        Sidecar.__init__.__kwdefaults__, "rank_module", "tests.support.rank_programs.garbage_rank"
    )
    report = examination.examine(("cpu:0", "cpu:1"))
    broken = [v for v in report.verdicts if v.status == "broken"]
    assert [v.name for v in broken] == ["processes"] and report.exit_status == 1
    assert "protocol does not allow" in broken[0].finding


def test_a_driver_that_does_not_answer_is_one_broken_line(no_leaks, monkeypatch):
    def lost():
        raise RuntimeError("GPU is lost")

    monkeypatch.setattr(examination, "read_visible", lost)
    monkeypatch.setattr(examination, "_with_ranks", lambda *_: [])
    broken = [v for v in examination.examine().verdicts if v.status == "broken"]
    assert [v.name for v in broken] == ["driver"] and "GPU is lost" in broken[0].finding


@pytest.mark.real_start
def test_a_machine_that_cannot_start_a_process_is_one_broken_line(no_leaks, monkeypatch):
    def refuse(*_, **__):
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("subprocess.Popen", refuse)
    broken = [v for v in examination.examine(("cpu:0", "cpu:1")).verdicts if v.status == "broken"]
    assert [v.name for v in broken] == ["processes"] and "temporarily unavailable" in broken[0].finding


def test_another_system_is_one_line(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    report = examination.examine()
    assert [v.status for v in report.verdicts] == ["broken"] and "WSL2" in report.verdicts[0].remedy
