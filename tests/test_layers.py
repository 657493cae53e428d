"""The layers: which module may import which, read from the source, so that an arrow the wrong way fails here."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BACKEND = ROOT / "parallel_backend"

# Layer of each module below parallel_backend, by its first dotted part (or a longer prefix where needed).
GROUND = {
    "adapters",
    "calibration",
    "checkpoint",
    "computing",
    "deadlines",
    "decoding",
    "errors",
    "faults",
    "flux_file",
    "flux_keys",
    "memory_activations",
    "memory_messages",
    "memory_model",
    "memory_weights",
    "flux_tensors",
    "payloads",
    "places",
    "protocol",
    "requests",
    "shares",
    "stages",
    "step_cache",
    "strategy",
    "strict_json",
    "transport",
    "vae_keys",
    "whereabouts",
    "weight_patches",
}
COMFY_HALF = {
    "bench",
    "calibrate_once",
    "calibration_store",
    "capacity",
    "choice",
    "client",
    "compile_watch",
    "cost_model",
    "cost_traffic",
    "crash_history",
    "decide",
    "demo",
    "device_gauges",
    "device_shares",
    "devices",
    "doctor",
    "endings",
    "environment",
    "event_log",
    "events",
    "exchange",
    "experience",
    "failing_devices",
    "families",
    "fingerprint",
    "group_status",
    "hardware",
    "idle_watch",
    "live_sender",
    "local_machine",
    "measured_links",
    "measurements",
    "metrics",
    "metrics_switch",
    "news",
    "outlook",
    "pack_version",
    "panel_status",
    "patch_client",
    "plan",
    "pool",
    "preview",
    "prompts",
    "resume",
    "seats",
    "selector",
    "selector_inputs",
    "supervisor",
    "topology",
    "topology_probe",
    "trials",
    "user_settings",
    "vae_client",
    "warm_ranks",
}
# Rank's half, lowest first: a layer may import itself and those before it.
RANK_HALF = [
    "models",
    "engine",
    "sampling",
    "rank_errors",
    "rank_meter",
    "step_boundary",
    "rank_calibrate",
    "rank_decode",
    "rank_patches",
    "rank_jobs",
    "rank",
]
COMFYUI = {
    "comfy",
    "comfy_api",
    "comfy_extras",
    "nodes",
    "folder_paths",
    "server",
    "execution",
    "latent_preview",
}
_OBJECT_COLLECTIVES = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
}
XFUSER_OWNERS = {"engine.adjust_xfuser", "engine.xfuser"}


def _modules():
    return {
        ".".join(path.relative_to(BACKEND).with_suffix("").parts): path
        for path in sorted(BACKEND.rglob("*.py"))
        if path.name not in ("__init__.py", "__main__.py")
    }


def _imports(path, package):
    """(absolute module names, names inside parallel_backend) that the file imports anywhere, functions included."""
    outside, inside = set(), set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            outside |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            if node.level == 0:
                outside.add(node.module)
                continue
            base = package[: len(package) - (node.level - 1)]
            target = ".".join([*base, *([node.module] if node.module else [])])
            names = [target] if node.module else [".".join([*base, alias.name]) for alias in node.names]
            inside |= {name for name in names if name}
    return outside, inside


def _layer(module):
    return module.split(".")[0]


MODULES = _modules()
IMPORTS = {name: _imports(path, name.split(".")[:-1]) for name, path in MODULES.items()}


def test_every_module_has_a_layer():
    known = GROUND | COMFY_HALF | set(RANK_HALF)
    assert sorted({_layer(name) for name in MODULES} - known) == []


@pytest.mark.parametrize("module", MODULES)
def test_the_backend_imports_nothing_of_comfyui(module):
    outside, _ = IMPORTS[module]
    assert {name.split(".")[0] for name in outside} & COMFYUI == set()


@pytest.mark.parametrize("module", [m for m in MODULES if _layer(m) in GROUND | COMFY_HALF])
def test_comfyuis_process_loads_neither_engine_library(module):
    outside, _ = IMPORTS[module]
    assert {name.split(".")[0] for name in outside} & {"xfuser", "diffusers", "yunchang", "distvae"} == set()


@pytest.mark.parametrize("module", MODULES)
def test_arrows_point_down(module):
    _, inside = IMPORTS[module]
    targets = {_layer(name) for name in inside}
    layer = _layer(module)
    if layer in GROUND:
        allowed = GROUND
    elif layer in COMFY_HALF:
        allowed = GROUND | COMFY_HALF
    else:
        allowed = GROUND | set(RANK_HALF[: RANK_HALF.index(layer) + 1])
    assert targets <= allowed


@pytest.mark.parametrize("module", [m for m in MODULES if m not in XFUSER_OWNERS])
def test_one_place_owns_the_import_of_xfuser(module):
    outside, _ = IMPORTS[module]
    assert {name.split(".")[0] for name in outside} & {"xfuser", "yunchang"} == set()


def test_there_are_no_import_cycles():
    graph = {name: {n for n in inside if n in MODULES} for name, (_, inside) in IMPORTS.items()}
    done = set()

    def visit(name, trail):
        assert name not in trail, " -> ".join([*trail, name])
        if name not in done:
            for target in graph[name]:
                visit(target, [*trail, name])
            done.add(name)

    for name in graph:
        visit(name, [])


@pytest.mark.parametrize("path", sorted((ROOT / "nodes").glob("*.py")), ids=lambda p: p.stem)
def test_nodes_use_only_comfyuis_half_of_the_backend(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            isinstance(node, ast.ImportFrom)
            and node.level == 2
            and (node.module or "").startswith("parallel_backend")
        ):
            parts = node.module.split(".")[1:]
            names = {parts[0]} if parts else {alias.name for alias in node.names}
            assert names <= GROUND | COMFY_HALF, ast.unparse(node)


@pytest.mark.parametrize(
    "path", sorted(p for d in ("nodes", "parallel_backend") for p in (ROOT / d).rglob("*.py"))
)
def test_nothing_unpickles_or_executes_text(path):
    """Weights and frames are data: no pickle, torch.load, object collectives, eval, exec or shell."""
    forbidden = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            assert not {alias.name.split(".")[0] for alias in node.names} & forbidden
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] not in forbidden
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in ("torch.load", "eval", "exec", "compile", "os.system"), called
            assert called.split(".")[-1] not in _OBJECT_COLLECTIVES, called
            assert not any(keyword.arg == "shell" for keyword in node.keywords)
