"""Checkpoints: home, as boxes. A file knows no layout, so any layout and any number of ranks loads
any checkpoint.

    checkpoints/step-N/
      rank-00000.safetensors     masters and moments of the boxes that rank 0 speaks for,
                                 "kind|weight|box"
      rank-00000-1.safetensors   where they are more than FILE_BYTES, and so on
      rank-00001.safetensors     ...
      manifest.json              files with size and SHA-256, facts of the run, the run's seal,
                                 a SHA-256 of itself
    identity                     random, made with the run's first checkpoint: the key of the seal
    LATEST                       "step-N", moved only after N is durable
    BEST                         "step-N" of the lowest validation loss, where the run validates

Written into a hidden folder, fsynced, renamed, then LATEST is moved, then old ones are purged: a
death at any point leaves the last good checkpoint in place, and hidden folders that the next save
removes. Everything is verified before it is used; nothing is unpickled. One run saves into a folder
at a time.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from longshift.background import in_background
from longshift.dist.world import World
from longshift.errors import CheckpointError, OutOfMemoryError
from longshift.files import file_digest, is_no_room, sync, usual_mode
from longshift.layout.blocks import scales_of
from longshift.layout.box import Box
from longshift.spec.model import ModelSpec
from longshift.state.home import Source
from longshift.state.manifest import (
    FORMAT,
    IDENTITY,
    TYPES,
    Index,
    Manifest,
    SavedFile,
    index_boxes,
    instead,
    new_identity,
    read_manifest,
    render,
    sealed,
    steps_of,
)
from longshift.state.moments import SCALE

LATEST = "LATEST"
BEST = "BEST"
FILE_BYTES = 2 << 30
Entries = Iterable[tuple[str, Box, bool, dict[str, Tensor]]]
T = TypeVar("T")


def save(
    run: Path,
    step: int,
    entries: Entries,
    facts: Mapping[str, Any],
    world: World,
    keep: int,
    best: int | None = None,
) -> None:
    """Write checkpoint `step` of a run, replacing one of the same step; collective. `entries` as
    from `Optimizer.state`, `facts` any JSON. Then the newest `keep` up to this one stay, and that
    of step `best`, which BEST names from then on. Raises CheckpointError, on every rank in the same
    words, when one cannot write; the checkpoints before it, and LATEST, are then untouched."""
    UnfinishedCheckpoint(run, step, facts, world, keep, best).finish(entries)


class UnfinishedCheckpoint:
    """A checkpoint that is not one yet: a hidden folder, which `finish` makes the newest
    checkpoint. The arguments are those of `save`. Collective: making it, and `finish`. Mutable."""

    def __init__(
        self,
        run: Path,
        step: int,
        facts: Mapping[str, Any],
        world: World,
        keep: int,
        best: int | None,
    ):
        self.run = run
        self.step = step
        self.facts = facts
        self.world = world
        self.keep = keep
        self.best = best
        self._scratch = run / "checkpoints" / f".step-{step}.writing"
        self._fault = (
            f"checkpoint {run / 'checkpoints' / f'step-{step}'} cannot be written; the ones before"
            " it are untouched"
        )
        self._writing: Future[list[dict]] | None = None
        with self._swept():
            self._on_rank_0(self._fault, self._begin)

    def write(self, entries: Entries) -> None:
        """Write this rank's files in the background. The tensors of `entries`, in host memory, must
        stay as they are until `written`."""
        write = partial(_write_tensors, self._scratch, entries, self.world.rank)
        self._writing = in_background(write)

    @property
    def written(self) -> bool:
        """Whether this rank's files are written, or have failed."""
        return self._writing is None or self._writing.done()

    def finish(self, entries: Entries = ()) -> None:
        """Write what is not written in the background, and have the checkpoint take its place.
        Raises CheckpointError as `save` does."""
        write = partial(_write_tensors, self._scratch, entries, self.world.rank)
        if self._writing:
            write = self._writing.result
        with self._swept():
            # 1. Write this rank's files, and tell all ranks of them.
            rank_files = _together(self.world, self._fault, write)
            texts = self.world.gather_text(json.dumps(rank_files))
            files = [row for text in texts for row in json.loads(text)]

            # 2. Rank 0 makes the folder the newest checkpoint, and removes old ones.
            self._on_rank_0(self._fault, lambda: self._publish(files))
            failure = f"old checkpoints of {self.run} cannot be removed"
            self._on_rank_0(failure, lambda: _purge(self.run, self.step, self.keep, self.best))

    def _on_rank_0(self, failure: str, work: Callable[[], None]) -> None:
        """Collective, as `_together`: of its failure all ranks know."""
        _together(self.world, failure, work if self.world.rank == 0 else None)

    def _begin(self) -> None:
        # A save that died may have left a folder of this name.
        _sweep(self.run)
        self._scratch.mkdir(parents=True)
        if not (self.run / LATEST).exists():
            fresh = self.run / f".{IDENTITY}.writing"
            _write_text(fresh, new_identity())
            fresh.rename(self.run / IDENTITY)
            sync(self.run)

    def _publish(self, files: list[dict]) -> None:
        manifest = {"format": FORMAT, "step": self.step, "facts": dict(self.facts), "files": files}
        _write_text(self._scratch / "manifest.json", render(sealed(self.run, manifest)))
        sync(self._scratch)
        _publish(self.run, self.step, self._scratch, self.best)

    @contextmanager
    def _swept(self) -> Iterator[None]:
        """After a failure, which all ranks know of, none leaves, and with it ends the others,
        before what was written is gone."""
        try:
            yield
        except CheckpointError:
            if self.world.rank == 0:
                _sweep(self.run)
            self.world.gather_text("")
            raise


class Checkpoint:
    """A verified checkpoint, read box by box on demand. It opens each file once
    and keeps it open."""

    def __init__(self, folder: Path, manifest: Manifest, index: Index, files: dict[Path, Any]):
        """`files`: those that are open already."""
        self.folder = folder
        self.step = manifest.step
        self.facts = manifest.facts
        self._index = index
        self._files = files
        self.types: dict[str, set[str]] = {}  # by kind
        for kind, name in chain.from_iterable(file.types.items() for file in manifest.files):
            self.types.setdefault(kind, set()).add(name)

    @classmethod
    def latest(cls, run: Path, world: World, pointer: str = LATEST) -> "Checkpoint":
        """The checkpoint that LATEST names, or BEST, of the lowest validation loss; collective.
        Raises CheckpointError, on every rank in the same words, when there is none or it is
        damaged: the message names the file, and the older checkpoint that may serve instead."""
        name = _together(world, f"{run} cannot be read", lambda: _read_pointer(run, pointer))
        return cls.open(run / "checkpoints" / world.gather_text(name)[0], world)

    @classmethod
    def open(cls, folder: Path, world: World) -> "Checkpoint":
        """Verify and index a checkpoint; collective: every rank reads a share of the files to check
        them. Raises CheckpointError as `latest` does."""
        fault = f"{folder} cannot be read"
        manifest, digest = _together(world, fault, lambda: read_manifest(folder))
        if len(set(world.gather_text(digest))) > 1:
            raise CheckpointError(
                f"{folder} is not the same on all ranks: all machines must see one run folder"
            )
        if folder.name != f"step-{manifest.step}":
            raise CheckpointError(
                f"{folder} holds step {manifest.step}: it was moved; give each folder its own"
                f" name.{instead(folder)}"
            )
        index = _together(world, fault, lambda: index_boxes(folder, manifest))

        # Hashing takes as long as reading: each file is hashed by one rank.
        rank_files = manifest.files[world.rank :: world.size]
        files = _together(world, fault, lambda: _verify(folder, rank_files, index))
        return cls(folder, manifest, index, files)

    @property
    def older(self) -> str:
        """A sentence about what may serve instead."""
        return instead(self.folder).strip()

    @property
    def newer(self) -> list[int]:
        """Steps of the checkpoints after this one, ascending."""
        return [step for step in steps_of(self.folder.parent) if step > self.step]

    def expect(self, spec: ModelSpec, moments: Sequence[str]) -> None:
        """Refuse a checkpoint that does not hold every value of the model's weights, their moments
        and scales, or holds another weight's. Raises CheckpointError."""
        for param in spec.params:
            if param.frozen:
                continue
            name = param.name
            weight_box = Box.whole(param.shape)
            for kind in ("master", *moments):
                needed = scales_of(weight_box) if kind.endswith(SCALE) else weight_box
                boxes = [saved.box for saved in self._index.get((kind, name), ())]
                # Boxes are disjoint: inside, and with all its elements, they are the weight.
                num_elements = sum(box.elements for box in boxes)
                fit = all(len(box.shape) == len(needed.shape) and box in needed for box in boxes)
                if num_elements != needed.elements or not fit:
                    listed = ", ".join(map(str, boxes[:4])) + ", ..." * (len(boxes) > 4)
                    state = f"is {listed}" if boxes else "is not there"
                    raise CheckpointError(
                        f"{self.folder}: {kind} {name} {state}, {needed} is needed: incomplete, or"
                        " of another model"
                    )
        foreign = sorted({name for _, name in self._index} - set(spec.by_name))
        if foreign:
            raise CheckpointError(
                f"{self.folder} holds {foreign[0]}, which this model does not have: it is of"
                " another model"
            )

    def read(self, kind: str, name: str, box: Box) -> Tensor:
        """The values inside `box`, put together from whatever boxes were saved. Raises
        CheckpointError where some are missing."""
        out = None
        num_read = 0
        for saved in self._index.get((kind, name), ()):
            part = saved.box & box
            if not part:
                continue
            if saved.path not in self._files:
                self._files[saved.path] = safe_open(saved.path, framework="pt")
            values = self._files[saved.path].get_slice(saved.key)[part.within(saved.box)]
            # The format is the file's, known from the first box.
            out = torch.empty(box.shape, dtype=values.dtype) if out is None else out
            out[part.within(box)] = values
            num_read += part.elements
        if out is None or num_read != box.elements:
            raise CheckpointError(
                f"{self.folder} holds {num_read} of the {box.elements} values of {kind} {name}{box}"
            )
        return out

    def source(self) -> Source:
        """The masters as Home takes them."""
        return lambda name, box: self.read("master", name, box) if box else torch.empty(box.shape)


def _together(world: World, failure: str, work: Callable[[], T] | None) -> T:
    """The result of `work` on this rank; None has nothing to do. A failure on any rank is
    everyone's, in the words of the lowest that failed: OutOfMemoryError where its disk has no room,
    CheckpointError else."""
    result = None
    fault = ""
    is_full = False
    try:
        result = work() if work is not None else None
    except CheckpointError as error:
        fault = str(error)
    except (OSError, SafetensorError) as error:
        fault = f"{failure}: rank {world.rank}: {error}"
        is_full = is_no_room(error)
    faults = [json.loads(text) for text in world.gather_text(json.dumps([fault, is_full]))]
    for message, no_room in faults:
        if message:
            raise OutOfMemoryError(message) if no_room else CheckpointError(message)
    return result  # pyright: ignore[reportReturnType]


def _write_tensors(folder: Path, entries: Entries, rank: int) -> list[dict]:
    """This rank's files, durable; none where it speaks for nothing. Of a GPU no more than one
    file's tensors are in host memory."""
    files: list[dict] = []
    tensors: dict[str, Tensor] = {}

    def write() -> None:
        path = folder / f"rank-{rank:05}{f'-{len(files)}' if files else ''}.safetensors"
        with usual_mode(path):
            save_file(tensors, path)
        sync(path)
        row = {
            "name": path.name,
            "bytes": path.stat().st_size,
            "sha256": file_digest(path),
            "types": {_kind(key): TYPES[view.dtype] for key, view in tensors.items()},
            "tensors": sorted(tensors),
        }
        files.append(row)
        tensors.clear()

    room = FILE_BYTES
    for name, box, owned, views in entries:
        for kind, view in views.items() if owned and box else ():
            if tensors and view.nbytes > room:
                write()
                room = FILE_BYTES
            tensors[f"{kind}|{name}|{box}"] = view.detach().cpu().contiguous()
            room -= view.nbytes
    if tensors:
        write()
    return files


def _publish(run: Path, step: int, scratch: Path, best: int | None) -> None:
    """Make a finished folder the newest checkpoint. What may fail for want of space comes before
    the first rename, and LATEST last."""
    final = scratch.with_name(f"step-{step}")
    pointers = {LATEST: step}
    if best is not None and (best == step or scratch.with_name(f"step-{best}").is_dir()):
        pointers = {BEST: best, **pointers}
    for name, target in pointers.items():
        _write_text(run / f".{name}.writing", f"step-{target}\n")
    if final.exists():
        final.rename(final.with_name(f".{final.name}.replaced"))
    # LATEST may name only what is durable.
    scratch.rename(final)
    sync(final.parent)
    for name in pointers:
        (run / f".{name}.writing").rename(run / name)
    sync(run)


def _purge(run: Path, step: int, keep: int, best: int | None) -> None:
    """Hide, then remove, all but the newest `keep` up to `step` and the best one. Newer ones are of
    a run that a person went back from: they are left until this one reaches them."""
    folder = run / "checkpoints"
    steps = [s for s in steps_of(folder) if s <= step]
    for old in {*steps[:-keep]} - {best}:
        (folder / f"step-{old}").rename(folder / f".step-{old}.purged")
    _sweep(run)


def _sweep(run: Path) -> None:
    """Remove what saves that died have left."""
    for path in (run / "checkpoints").glob(".step-*"):
        shutil.rmtree(path, ignore_errors=True)
    for name in (LATEST, BEST, IDENTITY):
        with suppress(OSError):
            (run / f".{name}.writing").unlink()


def _read_pointer(run: Path, name: str) -> str:
    """The folder of the checkpoint that a pointer names."""
    pointer = run / name
    if name == BEST and not pointer.exists():
        raise CheckpointError(
            f"{run} has no best checkpoint: it has not validated yet (data.valid, or data.held_out)"
        )
    try:
        step = pointer.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as fault:
        raise CheckpointError(
            f"{pointer} cannot be read: {fault}.{instead(run / 'checkpoints' / 'none')}"
        ) from None
    is_step = re.fullmatch(r"step-[0-9]+", step) is not None
    folder = run / "checkpoints" / (step if is_step else "none")
    if not folder.is_dir():
        raise CheckpointError(
            f"{pointer} names {step!r}, which is not a checkpoint of this run.{instead(folder)}"
        )
    return step


def _verify(folder: Path, files: Sequence[SavedFile], index: Index) -> dict[Path, Any]:
    """Compare size, hash and header of files with the manifest. Returns the files, open."""
    listed: dict[Path, dict[str, tuple[int, ...]]] = {folder / file.name: {} for file in files}
    for saved in chain.from_iterable(index.values()):
        if saved.path in listed:
            listed[saved.path][saved.key] = saved.box.shape
    opened: dict[Path, Any] = {}
    for file in files:
        path = folder / file.name
        try:
            size = path.stat().st_size
            if size != file.bytes:
                raise CheckpointError(
                    f"{path} is damaged: it has {size} bytes, {file.bytes} were"
                    f" written.{instead(folder)}"
                )
            if file_digest(path) != file.sha256:
                raise CheckpointError(
                    f"{path} is damaged: its SHA-256 differs from the manifest's.{instead(folder)}"
                )
            opened[path] = tensors = safe_open(path, framework="pt")
            slices = {key: tensors.get_slice(key) for key in tensors.keys()}  # noqa: SIM118
            if {key: tuple(part.get_shape()) for key, part in slices.items()} != listed[path]:
                raise CheckpointError(
                    f"{path} does not hold the boxes that manifest.json lists.{instead(folder)}"
                )
            for key, part in slices.items():
                type_name = file.types.get(_kind(key))
                if part.get_dtype() != type_name:
                    raise CheckpointError(
                        f"{path} holds {key} as {part.get_dtype()}, {type_name} was"
                        f" written.{instead(folder)}"
                    )
        except (OSError, SafetensorError) as fault:
            raise CheckpointError(f"{path} cannot be read: {fault}.{instead(folder)}") from None
    return opened


def _kind(key: str) -> str:
    """Of a tensor's key."""
    return key.partition("|")[0]


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, "utf-8")
    sync(path)
