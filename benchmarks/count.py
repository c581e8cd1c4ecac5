"""How large the project is: syntax nodes by room, files, keys of a config, words of a layout.

    make count                              # python benchmarks/count.py

Syntax nodes do not change when dense code is written plainly; lines do. A key of a config counts
once, where a value is written: sections and the entries of their lists are not counted themselves.
"""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from longshift.config import Config
from longshift.layout import layout

ROOT = Path(__file__).parents[1]


def size(path: Path) -> int:
    """Syntax nodes of a file."""
    return sum(1 for _ in ast.walk(ast.parse(path.read_text())))


def rooms(package: Path) -> dict[str, tuple[int, int]]:
    """Syntax nodes and files of each folder of the package, and of the files beside them."""
    nodes, files = Counter[str](), Counter[str]()
    for path in package.rglob("*.py"):
        parts = path.relative_to(package).parts
        room = parts[0] if len(parts) > 1 else "front"
        nodes[room] += size(path)
        files[room] += 1
    return {room: (count, files[room]) for room, count in nodes.most_common()}


def leaf_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Keys of a config that hold a value."""
    for name, field in model.model_fields.items():
        sections = list(_sections(field.annotation))
        if not sections:
            yield f"{prefix}{name}"
        for section in sections:
            yield from leaf_keys(section, f"{prefix}{name}.")


def _sections(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _sections(argument)


def main() -> None:
    found = rooms(ROOT / "src" / "longshift")
    print(f"{'room':<12}{'nodes':>10}{'files':>8}")
    for room, (nodes, files) in found.items():
        print(f"{room:<12}{nodes:>10,}{files:>8}")
    print(f"{'all':<12}{sum(n for n, _ in found.values()):>10,}{sum(n for _, n in found.values()):>8}")
    tests = list((ROOT / "tests").rglob("*.py"))
    print(f"{'tests':<12}{sum(map(size, tests)):>10,}{len(tests):>8}")
    keys = sorted(set(leaf_keys(Config)))
    print(f"\nkeys of a config: {len(keys)}")
    print(f"words of a layout: {len({*layout.number_fields(), *layout._FLAGS, 'chunk'})}")


if __name__ == "__main__":
    main()
