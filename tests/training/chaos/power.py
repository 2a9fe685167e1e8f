"""What a power cut leaves: a model of a disk on which nothing is sure until it was flushed.

A file keeps the content of its last fsync, a folder the names of its last fsync: a new file, a rename or a removal is sure once
the folder that names it was flushed, and only then. (Real file systems do more than they must. Ours may not rely on it.)
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Node:
    """A file, or a folder if it has names: as it is, and as the disk has it for sure."""

    is_folder: bool
    content: bytes = b""
    sure: bytes = b""
    names: dict[str, "Node"] = field(default_factory=dict)
    sure_names: dict[str, "Node"] = field(default_factory=dict)


@dataclass(frozen=True)
class Call:
    """A line of the shim's journal."""

    what: str
    path: str
    other: str
    data: bytes


def read_journal(path: Path) -> Iterator[Call]:
    """The calls of a run, in their order."""
    with path.open("rb") as file:
        while head := file.readline():
            what, name, other, size = head.decode().rstrip("\n").split("\t")
            yield Call(what, name, other, file.read(int(size)))


class Disk:
    """Replays a journal. `root` is a folder that was there, and flushed, before."""

    def __init__(self, root: Path) -> None:
        self.root, self.top = root, Node(is_folder=True)

    def _parts(self, path: str) -> tuple[str, ...]:
        return Path(path).relative_to(self.root).parts

    def _at(self, parts: tuple[str, ...]) -> Node:
        node = self.top
        for part in parts:
            node = node.names[part]
        return node

    def apply(self, call: Call) -> None:
        """Make one call."""
        parts = self._parts(call.path)
        if call.what == "sync":
            node = self._at(parts)
            node.sure, node.sure_names = node.content, dict(node.names)
            return
        above = self._at(parts[:-1])
        if call.what in ("create", "mkdir"):
            above.names[parts[-1]] = Node(is_folder=call.what == "mkdir")
        elif call.what == "remove":
            del above.names[parts[-1]]
        elif call.what == "rename":
            *there, name = self._parts(call.other)
            self._at(tuple(there)).names[name] = above.names.pop(parts[-1])
        else:
            node, place = above.names[parts[-1]], int(call.other)
            if call.what == "write":
                node.content = node.content[:place].ljust(place, b"\0") + call.data + node.content[place + len(call.data) :]
            else:
                node.content = node.content[:place].ljust(place, b"\0")

    def survivors(self, names: str, node: Node | None = None, at: str = "") -> dict[str, bytes | None]:
        """What a cut now leaves: content by path, None for folders. `names` are those that are "sure", or "all" there are
        (the disk was quicker with names than with contents)."""
        node = self.top if node is None else node
        found: dict[str, bytes | None] = {}
        for name, inner in (node.sure_names if names == "sure" else node.names).items():
            path = f"{at}{name}"
            found[path] = None if inner.is_folder else inner.sure
            if inner.is_folder:
                found |= self.survivors(names, inner, f"{path}/")
        return found


def plant(found: dict[str, bytes | None], root: Path) -> None:
    """Make files and folders of what survived."""
    for name, content in found.items():
        if content is None:
            (root / name).mkdir(parents=True, exist_ok=True)
        else:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(content)
