"""The house: one room per verb, imports go down, no file name occurs twice, and tests mirror the rooms."""

import ast
from collections import Counter
from pathlib import Path

import pytest

import noisewise

PACKAGE = Path(noisewise.__file__).parent
FLOORS = [
    {"core"},
    {"samplers"},
    {"spec", "listener", "sound"},  # names every sampler and weighting; hears the optimizer for them; checks what they make
    {"recipes"},  # the front door
    {"looking"},
    {"noisewise"},  # what `import noisewise` brings
    {"integrations", "data", "models"},
    {"training"},
    {"generation"},
    {"metrics"},
    {"study"},
    {"report"},
    {"analysis"},
    {"papers"},
    {"commands"},
]
"""From the ground up. A room imports from itself and from the floors below."""
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
FILES = sorted(path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
MODULES = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in FILES if path.suffix == ".py"}


def room(module: str) -> str:
    """The room of a module; files at the top are the core, but for a few."""
    first = module.split(".")[1] if "." in module else module
    if first in ("__init__", "noisewise", "names"):
        return "noisewise"
    if first == "__main__":
        return "commands"
    return first if (PACKAGE / first).is_dir() or first in FLOOR else "core"


def imported(path: Path) -> set[str]:
    """The modules of the package that a file imports anywhere, also within functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in MODULES or f"{name}.__init__" in MODULES else str(node.module) for name in names}
    return {name for name in found if name.split(".")[0] == "noisewise"}


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down(module):
    here = room(module)
    others = {name: room(name) for name in imported(MODULES[module])}
    wrong = [name for name, there in others.items() if there != here and FLOOR[there] >= FLOOR[here]]
    assert not wrong, f"{module} ({here}) imports {', '.join(sorted(wrong))}"


def test_every_folder_is_a_room():
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders <= set(FLOOR)


def test_no_file_name_occurs_twice():
    names = Counter(path.name for path in FILES if path.name != "__init__.py")
    assert [name for name, count in names.items() if count > 1] == []


def test_tests_mirror_the_rooms():
    folders = {path.name for path in Path(__file__).parent.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders <= set(FLOOR) | {"workers"}  # programs that tests start
