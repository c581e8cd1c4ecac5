"""Files that are on the disk when we say so, and folders that appear whole or not at all."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path


def publish(target: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write files into a temporary folder beside `target`, make them durable, and rename it to `target`.

    When another process publishes `target` first, its folder stays and ours is dropped: for names that determine the content.
    Raises OSError (disk full, no permission) and what `fill` raises; then nothing is left behind.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(".building", f"{target.name}.", target.parent, ignore_cleanup_errors=True) as aside:
        building = Path(aside, target.name)  # inside, as the temporary folder itself is for its owner only
        building.mkdir()
        fill(building)
        for path in [*building.iterdir(), building]:
            sync(path)
        try:
            building.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    sync(target.parent)


def sync(path: Path) -> None:
    """Make a file's contents, or a folder's entries, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rewrite(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old text or the new, never a part."""
    fresh = path.with_name(f".{path.name}-{os.getpid()}")
    fresh.write_text(text, encoding="utf-8")
    os.replace(fresh, path)
