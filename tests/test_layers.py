"""The rooms of the house and who may import whom, read from the source, so that an arrow the wrong way fails here."""

import ast
import io
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Each room and the rooms it may import besides itself and the vocabulary in the root's files. Listed lowest first.
ROOMS = {
    "wire": set(),
    "cluster": {"wire"},
    "models": {"wire"},
    "engine": {"models", "wire"},
    "sampling": {"engine"},
    "rank": {"sampling", "engine", "models", "cluster", "wire"},
    "sidecar": {"cluster", "wire"},
    "machine": {"wire"},
    "planner": {"sidecar", "machine", "models", "wire"},
    "observability": {"planner", "sidecar", "machine", "models", "wire"},
    "commands": {
        "observability",
        "planner",
        "sidecar",
        "machine",
        "models",
        "sampling",
        "cluster",
        "wire",
    },
    "nodes": {"observability", "planner", "sidecar", "machine", "models", "wire"},
}
RANKS_HALF = {"engine", "sampling", "rank"}
# Rooms that know no family of models: what is one family's lives in its folder below models/.
ROOMS_WITHOUT_A_FAMILY = ["engine", "sampling", "rank"]
# ComfyUI and its parts. In a rank only `models/comfyui/` may use them.
COMFYUI = {
    "comfy",
    "comfy_api",
    "comfy_extras",
    "comfy_execution",
    "nodes",
    "folder_paths",
    "server",
    "execution",
    "latent_preview",
}
ENGINE_LIBRARIES = {"xfuser", "diffusers", "yunchang", "distvae"}
XFUSER_OWNERS = {
    "parallel_backend.engine.attention.compat_xfuser",
    "parallel_backend.engine.attention.xfuser",
}
# A family's own files outside of models/, in whose rooms' code no family has a name otherwise.
FAMILYS_OWN = {"nodes.flux_loader", "nodes.model.flux"}
# How others call the loader node of Flux.1.
LOADER_NODE = {"flux_loader", "ParallelFluxLoader"}
_OBJECT_COLLECTIVES = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
}


def _name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {
    _name(path): path
    for folder in ("parallel_backend", "nodes")
    for path in sorted((ROOT / folder).rglob("*.py"))
}


def _imports(path):
    """(modules of others, modules of the pack) that the file imports anywhere, functions included."""
    package = path.relative_to(ROOT).parts[:-1]
    outside, inside = set(), set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            outside |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            outside.add(node.module.split(".")[0])
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(
                [*package[: len(package) - (node.level - 1)], *([node.module] if node.module else [])]
            )
            for alias in node.names:
                submodule = f"{base}.{alias.name}"
                inside.add(submodule if submodule in MODULES else base)
    return outside, inside


IMPORTS = {name: _imports(path) for name, path in MODULES.items()}


def _room(module):
    """The room a module lies in; empty for the root's files."""
    parts = module.split(".")
    if parts[0] == "nodes":
        return "nodes"
    return parts[1] if len(parts) > 1 and parts[1] in ROOMS else ""


def _with_packages(modules):
    """Those modules and the packages around them, whose __init__ Python runs first."""
    return {".".join(m.split(".")[:n]) for m in modules for n in range(1, m.count(".") + 2)} & set(MODULES)


def _reachable(modules):
    """All modules of the pack that importing these may import, at once or later."""
    found, todo = set(), set(modules)
    while todo:
        found |= todo
        todo = _with_packages(name for module in todo for name in IMPORTS[module][1]) - found
    return found


def test_the_root_holds_only_the_vocabulary():
    backend = ROOT / "parallel_backend"
    assert len(list(backend.glob("*.py"))) <= 10
    assert {p.name for p in backend.iterdir() if p.is_dir() and p.name != "__pycache__"} == set(ROOMS) - {
        "nodes"
    }


def _wrong(check, modules=MODULES):
    """What `check` finds wrong, by module."""
    return {module: wrong for module in modules if (wrong := check(module))}


def test_arrows_point_down():
    def upwards(module):
        room = _room(module)
        return {_room(name) for name in IMPORTS[module][1]} - {room, ""} - ROOMS.get(room, set())

    door = {"parallel_backend.__main__"}  # to every room's commands
    assert _wrong(upwards, MODULES.keys() - door) == {}
    assert _wrong(upwards, door) != {}  # the control


def test_the_backend_imports_nothing_of_comfyui():
    own = [name for name in MODULES if name.startswith("parallel_backend.models.comfyui")]
    backend = [name for name in MODULES if _room(name) != "nodes" and name not in own]
    assert _wrong(lambda module: IMPORTS[module][0] & COMFYUI, backend) == {}
    assert _wrong(lambda module: IMPORTS[module][0] & COMFYUI, own) != {}  # the control


def test_nothing_that_nodes_reach_loads_an_engine_library_or_a_ranks_half():
    reached = _reachable([name for name in MODULES if _room(name) == "nodes"])
    assert {name for name in reached if _room(name) in RANKS_HALF} == set()
    assert {name for name in reached if IMPORTS[name][0] & ENGINE_LIBRARIES} == set()


def test_one_place_owns_the_import_of_xfuser():
    others = MODULES.keys() - XFUSER_OWNERS
    assert _wrong(lambda module: IMPORTS[module][0] & {"xfuser", "yunchang"}, others) == {}


def test_rooms_of_a_rank_do_not_even_say_the_name_of_a_family():
    def lines(module):
        tokens = tokenize.generate_tokens(io.StringIO(MODULES[module].read_text()).readline)
        code = [token for token in tokens if token.type != tokenize.COMMENT]
        return [token.start[0] for token in code if "flux" in token.string.lower()]

    assert _wrong(lines, [name for name in MODULES if _room(name) in ROOMS_WITHOUT_A_FAMILY]) == {}
    assert _wrong(lines, ["parallel_backend.models.diffusers.module"]) != {}  # the control


def test_there_are_no_import_cycles():
    done = set()

    def visit(name, trail):
        assert name not in trail, " -> ".join([*trail, name])
        if name not in done:
            for target in IMPORTS[name][1] & set(MODULES):
                visit(target, [*trail, name])
            done.add(name)

    for name in MODULES:
        visit(name, [])


def _runs_text(tree):
    """Lines that unpickle, or run what they read."""
    forbidden = {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            wrong = bool({alias.name.split(".")[0] for alias in node.names} & forbidden)
        elif isinstance(node, ast.ImportFrom):
            wrong = (node.module or "").split(".")[0] in forbidden
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            wrong = called in ("torch.load", "eval", "exec", "compile", "os.system")
            wrong |= called.split(".")[-1] in _OBJECT_COLLECTIVES
            wrong |= any(keyword.arg == "shell" for keyword in node.keywords)
        else:
            continue
        if wrong:
            yield node.lineno


def test_nothing_unpickles_or_executes_text():
    """Weights and frames are data: no pickle, torch.load, object collectives, eval, exec or shell."""
    assert _wrong(lambda module: list(_runs_text(ast.parse(MODULES[module].read_text())))) == {}
    for wrong in ("import pickle", "from dill import x", "torch.load(f)", "eval(x)", "run(x, shell=True)",
                  "dist.gather_object(x)"):  # fmt: skip
        assert list(_runs_text(ast.parse(wrong))) == [1], wrong


def test_flux_is_named_in_its_own_home_only():
    """In code: words for people, in strings and comments, may name what the pack runs."""

    def names(module):
        with MODULES[module].open("rb") as file:
            found = {t.string for t in tokenize.tokenize(file.readline) if t.type == tokenize.NAME}
        return {name for name in found - LOADER_NODE if "flux" in name.lower()}

    others = [name for name in MODULES if _room(name) != "models" and name not in FAMILYS_OWN]
    assert _wrong(names, others) == {}
    assert _wrong(names, FAMILYS_OWN).keys() == FAMILYS_OWN  # the control


def test_only_the_loader_node_knows_comfyuis_flux():
    assert [name for name, (_, inside) in IMPORTS.items() if "nodes.model.flux" in inside] == [
        "nodes.flux_loader"
    ]
