"""The manifest of a checkpoint: what lies in its files, what the run was, and that this run wrote
it.

[Note: the seal] A SHA-256 finds damage. Whoever changes a manifest can make its SHA-256 again, and
a checkpoint of another run has a right one. The seal is an HMAC of the manifest with the run's
identity. It shows that this run wrote it: a step, a cursor or a file that was changed by a program
that does not have the identity is refused, and so is a checkpoint that was put here. A run folder
that is moved or copied whole takes its identity with it.
"""

import hashlib
import hmac
import json
import re
import secrets
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from longshift.errors import CheckpointError, shown
from longshift.layout.box import Box

IDENTITY = "identity"
TypeName = Literal["F32", "F64", "BF16", "F8_E4M3"]  # of safetensors
TYPES: dict[torch.dtype, TypeName] = {
    **{torch.float32: "F32", torch.float64: "F64", torch.bfloat16: "BF16"},
    torch.float8_e4m3fn: "F8_E4M3",
}
FORMAT = 2


class SavedFile(BaseModel):
    """One file of a checkpoint. `tensors` are its keys, "kind|weight|box"; `types` are theirs, by
    kind."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: Annotated[str, Field(pattern=r"^rank-[0-9]{5,}(-[0-9]+)?\.safetensors$")]
    bytes: int
    sha256: str
    types: dict[str, TypeName]
    tensors: list[str]


class Manifest(BaseModel):
    """What a checkpoint holds. `facts` are the run's."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    format: int
    step: Annotated[int, Field(ge=0)]
    facts: dict[str, Any]
    files: list[SavedFile]


@dataclass(frozen=True)
class SavedBox:
    """Where the values of one box lie."""

    path: Path
    key: str
    box: Box


Index = dict[tuple[str, str], list[SavedBox]]  # by kind and weight


def read_manifest(folder: Path) -> tuple[Manifest, str]:
    """The manifest of a checkpoint, and its SHA-256. Raises CheckpointError where it is missing,
    damaged or of another program."""
    path = folder / "manifest.json"
    try:
        text = path.read_text("utf-8")
        body = json.loads(text)
        digest = body.pop("sha256")
        # Also a change that JSON does not see, such as a space, is damage.
        intact = text == render(body)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as fault:
        raise CheckpointError(f"{path} is missing or damaged: {fault}.{instead(folder)}") from None
    if not intact:
        raise CheckpointError(f"{path} is damaged: its own SHA-256 differs.{instead(folder)}")
    # Before the seal, which another version may make otherwise.
    if body.get("format") != FORMAT:
        message = (
            f"{path} has format {shown(body.get('format'))}, this version of longshift reads"
            f" {FORMAT}: use the one that wrote it."
        )
        raise CheckpointError(message + instead(folder))
    seal = body.pop("seal", None)
    if body | {"seal": seal} != sealed(folder.parent.parent, body):
        reason = f"it is of another run, or it, or {IDENTITY} in the run folder, was changed"
        raise CheckpointError(f"{path} was not written by this run: {reason}.{instead(folder)}")
    try:
        return Manifest(**body), digest
    except ValidationError as fault:
        first = fault.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise CheckpointError(
            f"{path} is malformed: {where} is {shown(first['input'])}:"
            f" {first['msg']}.{instead(folder)}"
        ) from None


def index_boxes(folder: Path, manifest: Manifest) -> Index:
    """Where every box lies; the boxes of a weight are disjoint. Raises CheckpointError where they
    are not, or a key is malformed."""
    path = folder / "manifest.json"
    index = Index()
    cache: dict[str, Box] = {}  # by text: the kinds of a weight have the same boxes
    for file in manifest.files:
        for key in file.tensors:
            kind, name, box = _parse_key(path, key, cache)
            index.setdefault((kind, name), []).append(SavedBox(folder / file.name, key, box))
    for (kind, name), entries in index.items():
        shared = overlap([saved.box for saved in entries])
        if shared:
            first, second = shared
            raise CheckpointError(
                f"{path} is malformed: {kind} {name} is there twice, as {first} and"
                f" {second}.{instead(folder)}"
            )
    return index


def _parse_key(path: Path, key: str, cache: dict[str, Box]) -> tuple[str, str, Box]:
    """Kind, weight and box of a key; `cache` remembers the boxes that were parsed."""
    try:
        kind, name, text = key.split("|")
        if text in cache:
            return kind, name, cache[text]
        box = Box.parse(text)
        # Only the text that is written is read, so that a box has one key.
        if str(box) == text and box and min(box.start) >= 0:
            cache[text] = box
            return kind, name, box
    except ValueError:
        pass
    raise CheckpointError(
        f"{path} is malformed: {key!r} is not KIND|WEIGHT|BOX.{instead(path.parent)}"
    )


def overlap(boxes: list[Box]) -> tuple[Box, Box] | None:
    """Two boxes that share a value or differ in their number of dims, if any.
    Sweeps along dim 0."""
    # Boxes that end before this one starts share nothing with it, nor with any after it.
    candidates: list[Box] = []
    for box in sorted(boxes):
        candidates = [candidate for candidate in candidates if candidate.stop[0] > box.start[0]]
        for candidate in candidates:
            if len(candidate.shape) != len(box.shape) or candidate & box:
                return candidate, box
        candidates.append(box)
    return None


def new_identity() -> str:
    """The text of a file `identity`."""
    return secrets.token_hex(32) + "\n"


def sealed(run: Path, body: dict[str, Any]) -> dict[str, Any]:
    """A manifest with the seal of a run. [Note: the seal] Raises CheckpointError where the seal
    cannot be read."""
    path = run / IDENTITY
    try:
        identity = bytes.fromhex(path.read_text("utf-8"))
    except (OSError, ValueError) as fault:
        raise CheckpointError(
            f"{path} cannot be read: {fault}. It goes with its checkpoints wherever they go; put it"
            " back"
        ) from None
    return {
        "seal": hmac.new(identity, json.dumps(body, sort_keys=True).encode(), "sha256").hexdigest(),
        **body,
    }


def render(body: dict[str, Any]) -> str:
    """The one text of a manifest: any other is a damaged one."""
    return json.dumps({"sha256": _digest(body), **body}, indent=1)


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def instead(folder: Path) -> str:
    """What may serve instead of the checkpoint `folder`: the newest before it, or of all where it
    is no step, that has a manifest."""
    match = re.fullmatch(r"step-([0-9]+)", folder.name)
    for step in reversed(steps_of(folder.parent)):
        is_earlier = match is None or step < int(match[1])
        manifest = folder.parent / f"step-{step}" / "manifest.json"
        if is_earlier and manifest.is_file():
            latest = shlex.quote(str(folder.parent.parent / "LATEST"))
            return f" An older checkpoint may serve: echo step-{step} > {latest}"
    return f" There is no {'older' if match else 'other'} checkpoint of this run."


def steps_of(checkpoints: Path) -> list[int]:
    """Steps with a checkpoint, ascending; none where there is no such folder."""
    names = (re.fullmatch(r"step-([0-9]+)", path.name) for path in checkpoints.glob("step-*"))
    return sorted(int(match[1]) for match in names if match)
