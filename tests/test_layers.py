"""The floors of the house: a file imports only from lower floors or from its own room, wherever the import stands."""

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "megarl"

# Room -> floor. A room is a folder of megarl/, a file there, or the few files that share a line of the plan.
FLOORS = {
    "commands": 6,
    "scripts": 6,
    "trainer": 5,
    "async_trainer": 5,
    "sft": 5,
    "evaluation": 4,
    "judging": 4,
    "planning": 4,
    "training": 3,
    "rollout": 3,
    "resharding": 3,
    "models": 2,
    "algorithms": 2,
    "rewards": 2,
    "data": 2,
    "ops": 1,
    "csrc": 1,
    "parallel": 1,
    "observability": 1,
    "versions": 1,
    "config": 0,
    "types": 0,
    "errors": 0,
    "supervisor": 0,
}
SHARED_ROOMS = {"__main__": "commands", "cli": "commands", "launcher": "commands"}
# Rooms of one floor that work hand in hand, in one direction.
NEIGHBOURS = {
    ("judging", "evaluation"),  # a win rate's interval is a held-out figure's
    ("ops", "csrc"),  # an op dispatches to its kernel
    ("training", "resharding"),  # a policy's weights are described, loaded and exported as pieces
}

# prefix of the file -> what it must not import, and why
DRIVER_FREE_OF = ["megatron", "megarl.parallel", "megarl.models", "megarl.training", "megarl.resharding", "megarl.ops"]
# Rank 0's end of the channel to the rollout driver runs in the trainer; the driver's own files must not import it.
RANK_0_SIDE = ["rollout/handle.py", "rollout/start.py"]
FORBIDDEN = {
    "rollout/": (
        [*DRIVER_FREE_OF, "megarl.rollout.handle", "megarl.rollout.start"],
        "the rollout driver is a process without Megatron",
    ),
    **{
        f"resharding/{stem}.py": (
            ["megatron", "megarl.parallel", "megarl.models", "megarl.training", "megarl.resharding.megatron_layout"],
            "engine workers load it, and Megatron must not come along",
        )
        for stem in "pieces plan audit transport shared_memory handshake vllm_layout vllm_reload vllm_plugin".split()
    },
    "algorithms/": (
        ["torch.distributed", "megatron", "megarl.parallel", "vllm"],
        "algorithms are tensors in, tensors out: what is global comes in as an argument",
    ),
    "rewards/": (["torch", "megatron", "vllm"], "rewards run in the rollout driver and its workers"),
    "types.py": (["megatron", "vllm", "transformers"], "types are loaded everywhere"),
    "config/": (["torch", "megatron", "vllm", "transformers"], "a configuration is checked before heavy imports"),
}
SERIALISERS = ["pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"]


def python_files(root: Path = ROOT) -> list[Path]:
    """Every file of the package, those behind the link megarl/csrc included, relative to megarl/."""
    files = [*root.rglob("*.py"), *(root / "csrc").glob("**/*.py")]
    return sorted({file.relative_to(root) for file in files})


FILES = python_files()


def room_of(module: str) -> str:
    """ "megarl.rollout.driver" -> "rollout"; "megarl.cli" -> "commands"."""
    top = module.split(".")[1]
    return SHARED_ROOMS.get(top, top)


def module_of(file: Path) -> str:
    return ".".join(["megarl", *file.with_suffix("").parts]).removesuffix(".__init__")


@cache
def imports_of(source: str, file: Path) -> set[str]:
    """Absolute names of all that `source` imports: "a.b" for `import a.b`, "a.b.c" for `from a.b import c`.

    Imports written as `import_module("name")` or `__import__("name")` count too.
    """
    package = ["megarl", *file.parent.parts]
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*start, *([node.module] if node.module else [])])
            found |= {f"{base}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__"):
                found.add(str(node.args[0].value))
    return found


@cache
def names_in(source: str) -> set[str]:
    """Every name, attribute and dotted attribute chain that `source` uses: {"torch", "torch.cuda", "cuda", ...}."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found |= {node.attr, ast.unparse(node)}
        elif isinstance(node, ast.alias):
            found |= {node.name, node.name.split(".")[-1]}
    return found


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def floor_violations(file: Path, source: str) -> list[str]:
    """What `file` imports from a floor that is not below its own, nor its own room."""
    mine = room_of(module_of(file))
    found = []
    for name in imports_of(source, file):
        if not is_within(name, "megarl") or name.count(".") == 0 or name == "megarl.__version__":
            continue
        theirs = room_of(name)
        if theirs != mine and (mine, theirs) not in NEIGHBOURS and FLOORS.get(theirs, 99) >= FLOORS[mine]:
            found.append(f"megarl/{file} (floor {FLOORS[mine]}) imports {name} (floor {FLOORS.get(theirs)})")
    return found


@pytest.mark.parametrize("file", RANK_0_SIDE)
def test_rank_0_side_exists(file):
    assert Path(file) in FILES


def read(file: Path) -> str:
    return (ROOT / file).read_text()


def inner_files() -> list[Path]:
    return [file for file in FILES if file != Path("__init__.py")]


def test_every_room_has_a_floor():
    unknown = {room_of(module_of(file)) for file in inner_files()} - set(FLOORS)
    assert not unknown, f"give {sorted(unknown)} a floor in FLOORS: what may it import, and who may import it?"
    assert Path("csrc/__init__.py") in FILES


def test_every_folder_is_a_package():
    bare = {file.parent for file in FILES} - {file.parent for file in FILES if file.name == "__init__.py"}
    assert not bare, f"{sorted(map(str, bare))} lack an __init__.py and would be missing from a wheel"


def test_package_itself_imports_nothing():
    assert imports_of(read(Path("__init__.py")), Path("__init__.py")) == set()


@pytest.mark.parametrize("file", inner_files(), ids=str)
def test_imports_only_from_lower_floors(file):
    assert floor_violations(file, read(file)) == []


@pytest.mark.parametrize("prefix", FORBIDDEN)
def test_rooms_stay_free_of_what_they_must_not_load(prefix):
    packages, reason = FORBIDDEN[prefix]
    files = [file for file in FILES if str(file).startswith(prefix) and str(file) not in RANK_0_SIDE]
    assert files, f"nothing under {prefix}: move this rule with the code"
    found = [
        f"megarl/{file} imports {name}"
        for file in files
        for name in imports_of(read(file), file)
        if any(is_within(name, package) for package in packages)
    ]
    assert not found, f"{reason}: {found}"


def reached_from(start: Path) -> dict[str, str]:
    """Every module that importing `start` may bring along, inside megarl and out, and the file that names it."""
    found: dict[str, str] = {}
    todo = [start]
    while todo:
        file = todo.pop()
        for name in imports_of(read(file), file):
            parts = name.split(".")
            for known in (".".join(parts[: i + 1]) for i in range(len(parts))):
                if known in found:
                    continue
                found[known] = str(file)
                if parts[0] == "megarl" and known != "megarl":
                    stem = "/".join(known.split(".")[1:])
                    todo += [f for f in (Path(f"{stem}.py"), Path(stem, "__init__.py")) if f in FILES]
    return found


@pytest.mark.parametrize(
    "start", ["rollout/driver.py", "supervisor.py", "rewards/worker.py", "resharding/vllm_plugin.py"]
)
def test_processes_without_megatron_reach_none(start):
    reached = reached_from(Path(start))
    heavy = {name: file for name, file in reached.items() if name in ("megatron", "megarl.parallel", "megarl.models")}
    assert not heavy, f"importing megarl/{start} brings along what must stay out of its process (named by): {heavy}"


@pytest.mark.parametrize("file", inner_files(), ids=str)
def test_global_state_and_device_questions_stay_in_parallel(file):
    names = names_in(read(file))
    if file.parts[0] != "parallel":
        state = [name for name in names if name == "parallel_state" or name == "mpu"]
        assert not state, f"megarl/{file} reads Megatron's global process groups; take them from the Layout it is given"
    if file != Path("parallel/device.py"):
        asked = [name for name in names if name.endswith("cuda.is_available")]
        assert not asked, f"megarl/{file} asks for CUDA itself; parallel/device.py is the one place"


@pytest.mark.parametrize("file", inner_files(), ids=str)
def test_nothing_is_pickled(file):
    source = read(file)
    collectives = [name for name in names_in(source) if "object_list" in name or name.endswith("gather_object")]
    assert not collectives, f"megarl/{file}: {collectives} pickle; send tensors, JSON or msgspec frames"
    modules = [name for name in imports_of(source, file) if name.split(".")[0] in SERIALISERS]
    assert not modules, f"megarl/{file} imports {modules}"


def violations_of(path: str, source: str) -> list[str]:
    return floor_violations(Path(path), source)


def test_the_scan_sees_every_form_of_import():
    upward = [
        "import megarl.trainer",
        "from megarl import trainer",
        "from megarl.training.policy import Policy",
        "from ..training import policy",
        "def f():\n    from megarl import sft\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from megarl.rollout.client import Client\n",
        "import importlib\nimportlib.import_module('megarl.trainer')",
    ]
    assert all(len(violations_of("data/prompts.py", source)) == 1 for source in upward)
    fine = "from . import packing\nfrom megarl.types import Prompt\nfrom megarl import __version__\nimport torch"
    assert violations_of("data/prompts.py", fine) == []
    assert len(violations_of("rewards/rule.py", "from megarl.data import prompts")) == 1  # same floor, another room
    assert len(violations_of("data/prompts.py", "from megarl.no_such_room import x")) == 1
    assert reached_from(Path("trainer.py"))["megatron"]  # so a clean answer elsewhere means something
    assert "torch.cuda.is_available" in names_in("x = torch.cuda.is_available()")
    assert "broadcast_object_list" in names_in("from torch.distributed import broadcast_object_list")
