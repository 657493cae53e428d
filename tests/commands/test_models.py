"""What the command says of a ComfyUI: proven with the pack, tested here, not yet, or gone; and what a test leaves."""

from __future__ import annotations

import json
import shutil

import pytest

from comfy_harness import require_comfyui
from parallel_backend.__main__ import main
from parallel_backend.commands.doctor.probes import probe_classes
from parallel_backend.commands.doctor.versions import check_classes
from parallel_backend.machine import cache_files, self_tests
from parallel_backend.models.proof.installed import VARIABLE
from parallel_backend.models.proof.states import entry_digest
from parallel_backend.models.tokens.table import TABLE
from parallel_backend.requests import ATTENTION, BLOCK, STAY
from parallel_backend.sidecar import self_test
from parallel_backend.wire.checks.self_test import SelfTest

LTX, LTX_SOURCE = "LTXVModel", "comfy/ldm/lightricks/model.py"


@pytest.fixture
def newer(tmp_path, monkeypatch):
    """A ComfyUI that the pack does not know: another text of one class's file, and another class's file gone."""
    root = require_comfyui()
    copy = tmp_path / "ComfyUI"
    shutil.copytree(root / "comfy", copy / "comfy", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(root / "comfyui_version.py", copy)
    (copy / LTX_SOURCE).write_text((copy / LTX_SOURCE).read_text() + "\n# another release\n")
    (copy / "comfy/ldm/krea2/model.py").unlink()
    monkeypatch.setattr(cache_files, "cache_folder", lambda: tmp_path / "kept")
    return copy


def _said(capsys, *arguments):
    status = main(["models", *arguments, "--json"])
    said = json.loads(capsys.readouterr().out)
    return status, {row["module"]: row for row in said["models"]}


def test_the_release_that_the_pack_was_proven_on_needs_no_test(capsys):
    status, rows = _said(capsys, "--comfyui", str(require_comfyui()))
    assert status == 0 and set(TABLE) <= set(rows)
    assert {rows[name]["proof"] for name in TABLE} == {"came with the pack"}
    assert rows["Flux"]["state"] == STAY and rows["ChromaRadiance"]["state"] == BLOCK


def test_a_class_that_the_pack_does_not_describe_is_named_too(newer, capsys):
    """One by one, with what is shared out of it, whatever release it came with."""
    source = newer / "comfy" / "model_base.py"
    text = source.read_text()
    assert text.count("unet_model=comfy.ldm.genmo.joint_model.asymm_models_joint.AsymmDiTJoint") == 1
    source.write_text(text.replace("asymm_models_joint.AsymmDiTJoint", "asymm_models_joint.Prism"))
    _, rows = _said(capsys, "--comfyui", str(newer))
    assert "AsymmDiTJoint" not in rows
    assert rows["Prism"]["state"] == ATTENTION and rows["Prism"]["proof"] == "not described"
    assert "queries of attention" in rows["Prism"]["words"]
    assert (
        rows["StageC"]["words"] == "whole images and prompts are shared out"
        or rows["StageC"]["state"] == ATTENTION
    )
    others = {name for name, row in rows.items() if row["proof"] == "not described"}
    assert {"CausalWanModel", "StageC", "Prism"} <= others and not others & set(TABLE)


def test_a_newer_release_says_what_is_new_and_what_a_test_found(newer, monkeypatch, capsys):
    status, rows = _said(capsys, "--comfyui", str(newer))
    assert status == 1, "a class is gone"
    assert rows[LTX]["proof"] == "not tested yet" and rows[LTX]["state"] == ""
    assert rows["SingleStreamDiT"]["proof"] == "not in this ComfyUI"
    assert rows["Flux"]["proof"] == "came with the pack"
    self_tests.SelfTestStore().keep(entry_digest(str(newer), LTX), SelfTest(LTX, BLOCK, 0.3))
    _, rows = _said(capsys, "--comfyui", str(newer))
    assert rows[LTX]["state"] == BLOCK and "another way" in rows[LTX]["words"]


def test_what_is_not_known_is_tested_once(newer, monkeypatch, capsys):
    asked = []

    def tests(root, names):
        asked.append(names)
        return [SelfTest(name, STAY, 1e-7) for name in names]

    monkeypatch.setattr(self_test, "run_self_tests", tests)
    for _ in range(2):
        _, rows = _said(capsys, "--comfyui", str(newer), "--test")
        assert rows[LTX] == {"module": LTX, "state": STAY, "proof": "tested here", "words": ""}
    assert len(asked) == 1 and LTX in asked[0] and "Flux" not in asked[0]


def test_the_table_is_for_people_and_a_folder_without_comfyui_is_named(newer, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("COMFYUI_PATH", str(newer))
    main(["models"])
    printed = capsys.readouterr().out
    assert "LTXVModel" in printed and "--test does so now" in printed
    assert main(["models", "--comfyui", str(tmp_path)]) == 2
    assert f"No ComfyUI in {tmp_path}" in capsys.readouterr().err


def test_the_doctor_says_in_a_line_what_of_this_comfyui_is_new(newer, monkeypatch):
    known = require_comfyui()
    monkeypatch.setenv(VARIABLE, str(newer))
    verdict = check_classes(*probe_classes())
    assert LTX in verdict.details and "Flux" not in verdict.details and verdict.status == "ok"
    assert f": {len(verdict.details)} kinds of models have new code; each is tested once" in verdict.finding
    assert verdict.remedy.endswith("python -m parallel_backend models --test")
    monkeypatch.setenv(VARIABLE, str(known))
    verdict = check_classes(*probe_classes())
    assert verdict.finding.endswith("compute as the pack knows them") and not (
        verdict.details or verdict.remedy
    )
    monkeypatch.setenv(VARIABLE, str(newer / "comfy"))
    assert probe_classes() is None
