"""`python -m parallel_backend cluster`: two secret files that other users cannot read, and a command to copy."""

import pytest

from parallel_backend.__main__ import main
from parallel_backend.cluster import endpoint as endpoints


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(endpoints.VARIABLE, str(tmp_path / "clusters"))
    return tmp_path / "clusters"


def test_init_makes_a_pair_that_only_knows_each_other(folder, capsys):
    assert main(["cluster", "init", "lab", "--address", "10.0.0.1", "--port", "1234"]) == 0
    head = endpoints.find_head("lab")
    machine = endpoints.read_endpoint(endpoints.machine_file("lab"), endpoints.MACHINE)
    assert (head.peer, machine.peer) == (machine.certificate, head.certificate)
    assert head.key != machine.key
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o600}
    assert folder.stat().st_mode & 0o777 == 0o700
    told = capsys.readouterr().out
    assert "--join 10.0.0.1:1234 --secret-file lab.machine.json" in told and "cluster:lab" in told
    assert main(["cluster", "list"]) == 0
    assert capsys.readouterr().out.startswith("lab: port 1234")


def test_certificates_that_machines_have_are_replaced_on_request_only(folder, capsys):
    main(["cluster", "init", "lab"])
    before = endpoints.find_head("lab")
    assert main(["cluster", "init", "lab"]) == 2
    assert "With --again" in capsys.readouterr().err
    assert endpoints.find_head("lab") == before
    assert main(["cluster", "init", "lab", "--again"]) == 0
    assert endpoints.find_head("lab").certificate != before.certificate


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["My Lab"], "a name is made of"),
        (["lab", "--port", "70000"], "ports are 1 to 65535"),
    ],
)
def test_what_cannot_be_is_told(words, told, folder, capsys):
    assert main(["cluster", "init", *words]) == 2
    assert told in capsys.readouterr().err
    assert not folder.exists()


def test_without_openssl_the_remedy_is_told(folder, capsys, monkeypatch):
    monkeypatch.setenv("PATH", str(folder))
    assert main(["cluster", "init", "lab"]) == 2
    assert "apt-get install openssl" in capsys.readouterr().err
