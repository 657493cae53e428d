"""The pack's rooms (each folder of parallel_backend/, and nodes/): which may import which, and how large they may be.

Each list of exceptions may only shrink: an entry that is no longer needed also fails a test.
"""

import ast
import io
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Each room and the rooms that it may import besides itself and the root's files, the vocabulary. Lowest room first.
ROOMS = {
    "wire": set(),
    "job": set(),
    "sampling": set(),
    "cluster": {"wire"},
    "machine": {"wire"},
    "models": {"wire"},
    "engine": {"models", "wire"},
    "rank": {"engine", "sampling", "models", "job", "cluster", "wire"},
    "sidecar": {"cluster", "job", "wire"},
    "planner": {"sidecar", "machine", "models", "wire"},
    "observability": {"planner", "sidecar", "machine", "models", "wire"},
    "commands": {
        "observability",
        "planner",
        "sidecar",
        "machine",
        "models",
        "sampling",
        "job",
        "cluster",
        "wire",
    },
    "nodes": {"observability", "planner", "sidecar", "machine", "models", "job", "wire"},
}
# The folders of a room, lowest floor first. Folders of one floor do not import each other; "" is the room's top files.
FLOORS = {
    "wire": [{"", "checks"}],
    "models": [
        {"tokens"},
        {""},
        {"comfyui", "diffusers", "demo"},
        {"proof", "comfyui/rows", "comfyui/jobs"},
    ],
    "engine": [{"comm"}, {"tokens"}, {"attention"}, {"blocks"}, {"stages", "bands"}, {""}],
    "rank": [{"outcome"}, {"checks", "pipefusion", "jobs"}, {"work"}, {"joined"}, {""}],
    "sidecar": [{"cluster", "process"}, {"group"}, {""}],
    "planner": [{"workload"}, {""}],
    "observability": [{""}, {"logs", "prometheus", "preview"}],
    "commands": [{"doctor"}, {"bench"}, {"gpu_check"}, {""}],
    "nodes": [{"host"}, {"model"}, {"job", "runs"}, {"", "routes", "preload"}],
}
# Exceptions: imports that go up within a room.
UPWARDS_WITHIN = {
    ("parallel_backend.models.diffusers.load", "parallel_backend.models.comfyui.placing"),
    ("parallel_backend.models.diffusers.load", "parallel_backend.models.comfyui.formats.slices"),
}
MAX_FILES, MAX_LINES, MIN_LINES = 12, 400, 30
LONG_FILES: set[str] = set()
# The first one stays short: code that runs before any heavy import.
SHORT_FILES = {
    "parallel_backend/wire/parent_death.py",
}
RANKS_HALF = {"engine", "sampling", "rank"}
# Rooms without code for a single model family: such code is in the family's folder below models/.
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
# Modules that import diffusers besides the models: for its attention dispatch and its GGUF arithmetic.
DIFFUSERS_OWNERS = {
    "parallel_backend.engine.attention.kernels",
    "parallel_backend.models.comfyui.formats.gguf_layout",
}
XFUSER_OWNERS = {
    "parallel_backend.engine.attention.compat_xfuser",
    "parallel_backend.engine.attention.xfuser",
}
# Names by which other modules call the loader node of Flux.1.
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
    """Returns (other libraries, modules of the pack) that the file imports anywhere, also inside functions."""
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
    """Returns the room of a module, or "" for the root's files."""
    parts = module.split(".")
    if parts[0] == "nodes":
        return "nodes"
    return parts[1] if len(parts) > 1 and parts[1] in ROOMS else ""


def _with_packages(modules):
    """Returns these modules and the packages around them, whose __init__ Python runs first."""
    return {".".join(m.split(".")[:n]) for m in modules for n in range(1, m.count(".") + 2)} & set(MODULES)


def _reachable(modules):
    """Returns all modules of the pack that importing these may import, immediately or later."""
    found, todo = set(), set(modules)
    while todo:
        found |= todo
        todo = _with_packages(name for module in todo for name in IMPORTS[module][1]) - found
    return found


def test_the_root_holds_only_the_vocabulary():
    backend = ROOT / "parallel_backend"
    assert len(list(backend.glob("*.py"))) <= 10
    folders = {path.name for path in backend.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == set(ROOMS) - {"nodes"}


def _wrong(check, modules=MODULES):
    """Returns what `check` finds wrong, by module."""
    return {module: wrong for module in modules if (wrong := check(module))}


DOOR = "parallel_backend.__main__"  # starts the commands of every room


def _upwards(module):
    """Returns the rooms that a module imports but must not import."""
    room = _room(module)
    return {_room(name) for name in IMPORTS[module][1]} - {room, ""} - ROOMS.get(room, set())


def test_arrows_point_down():
    assert _wrong(_upwards, MODULES.keys() - {DOOR}) == {}
    assert _upwards(DOOR) != set()  # the check can fail


def _floor(module):
    """Returns a module's (room, floor counted from below or None if FLOORS lacks it, folder within the room)."""
    room = _room(module)
    folders = MODULES[module].parent.relative_to(ROOT).parts
    folder = "/".join(folders[1 if room == "nodes" else 2 :])
    floors = FLOORS.get(room, [{folder}])
    while folder not in set().union(*floors) and "/" in folder:
        folder = folder.rpartition("/")[0]
    return room, next((n for n, names in enumerate(floors) if folder in names), None), folder


def test_arrows_point_down_within_a_room():
    assert [module for module in MODULES if _floor(module)[1] is None] == []
    found = set()
    for module, (_, inside) in IMPORTS.items():
        room, floor, folder = _floor(module)
        for name in inside & MODULES.keys():
            other, above, its = _floor(name)
            if room != other:
                continue
            beside = above == floor and folder != its and "" not in FLOORS[room][floor]
            if above > floor or beside:
                found.add((module, name))
    assert found == UPWARDS_WITHIN


def _lines(path):
    return len(path.read_text().splitlines())


def test_no_folder_holds_too_many_files():
    counts = {}
    for path in MODULES.values():
        folder = path.parent.relative_to(ROOT).as_posix()
        counts[folder] = counts.get(folder, 0) + 1
    assert {folder: count for folder, count in counts.items() if count > MAX_FILES} == {}


def test_no_file_is_too_long_and_few_are_too_short():
    lengths = {path.relative_to(ROOT).as_posix(): _lines(path) for path in MODULES.values()}
    assert {name for name, lines in lengths.items() if lines > MAX_LINES} == LONG_FILES
    short = {
        name for name, lines in lengths.items() if lines < MIN_LINES and not name.endswith("__init__.py")
    }
    assert short == SHORT_FILES, "a new crumb, or an entry to take out of SHORT_FILES"


def test_the_backend_imports_nothing_of_comfyui():
    own = [name for name in MODULES if name.startswith("parallel_backend.models.comfyui")]
    backend = [name for name in MODULES if _room(name) != "nodes" and name not in own]
    assert _wrong(lambda module: IMPORTS[module][0] & COMFYUI, backend) == {}
    assert _wrong(lambda module: IMPORTS[module][0] & COMFYUI, own) != {}  # the check can fail


def test_nothing_that_nodes_reach_loads_an_engine_library_or_a_ranks_half():
    reached = _reachable([name for name in MODULES if _room(name) == "nodes"])
    assert {name for name in reached if _room(name) in RANKS_HALF} == set()
    assert {name for name in reached if IMPORTS[name][0] & ENGINE_LIBRARIES} == set()


def test_one_place_owns_the_import_of_xfuser():
    others = MODULES.keys() - XFUSER_OWNERS
    assert _wrong(lambda module: IMPORTS[module][0] & {"xfuser", "yunchang"}, others) == {}


def test_one_place_owns_the_import_of_prometheus_client():
    owner = "parallel_backend.observability.prometheus.metrics"
    assert [name for name in MODULES if "prometheus_client" in IMPORTS[name][0]] == [owner]
    assert "prometheus_client" not in _imports(ROOT / "__init__.py")[0]


def test_few_places_import_diffusers():
    found = {name for name in MODULES if "diffusers" in IMPORTS[name][0]}
    assert {
        name for name in found if not name.startswith("parallel_backend.models.diffusers.")
    } == DIFFUSERS_OWNERS


def test_rooms_of_a_rank_do_not_even_say_the_name_of_a_family():
    def lines(module):
        tokens = tokenize.generate_tokens(io.StringIO(MODULES[module].read_text()).readline)
        code = [token for token in tokens if token.type != tokenize.COMMENT]
        return [token.start[0] for token in code if "flux" in token.string.lower()]

    assert _wrong(lines, [name for name in MODULES if _room(name) in ROOMS_WITHOUT_A_FAMILY]) == {}
    assert _wrong(lines, ["parallel_backend.models.diffusers.load"]) != {}  # the check can fail


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


PICKLES = {"pickle", "cloudpickle"}  # for jobs that ComfyUI sends to the ranks that it started
UNPICKLING = "parallel_backend.job.unpickling"


def _runs_text(tree, allowed=frozenset()):
    """Yields the lines that unpickle, or execute text or a shell. `allowed`: modules that may be imported anyway."""
    forbidden = {"pickle", "cloudpickle", "dill", "marshal", "shelve"} - allowed
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
    """Weights and frames are data: no pickle, torch.load, object collectives, eval, exec or shell.

    Only jobs are pickled, in one room.
    """

    def wrong(module):
        allowed = PICKLES if _room(module) == "job" else frozenset()
        return list(_runs_text(ast.parse(MODULES[module].read_text()), allowed))

    assert _wrong(wrong) == {}
    for text in ("import pickle", "from dill import x", "torch.load(f)", "eval(x)", "run(x, shell=True)",
                 "dist.gather_object(x)"):  # fmt: skip
        assert list(_runs_text(ast.parse(text))) == [1], text


def test_only_a_rank_can_reach_what_unpickles():
    others = [name for name in MODULES if _room(name) not in ("rank", "job")]
    assert UNPICKLING not in _reachable(others)


def test_flux_is_named_in_its_own_home_only():
    """Only names in code count: strings and comments are for people and may name what the pack runs."""

    def names(module):
        with MODULES[module].open("rb") as file:
            found = {t.string for t in tokenize.tokenize(file.readline) if t.type == tokenize.NAME}
        return {name for name in found - LOADER_NODE if "flux" in name.lower()}

    assert _wrong(names, [name for name in MODULES if _room(name) != "models"]) == {}
    assert _wrong(names, ["parallel_backend.models.diffusers.checkpoint"]) != {}  # the check can fail
