"""Clusters as JSON files: presets that come with Longshift, and profiles that it measured.

A profile carries the SHA-256 of its contents and the fingerprint of the hardware and software it
was measured on. A file that is not a profile, is damaged, or is of another machine than the one
asked for, is refused with the reason; so is one whose calibration is not of its own figures.
"""

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from importlib import resources
from pathlib import Path
from typing import Any

from longshift.cluster.cluster import (
    LEVELS,
    MOVED,
    SHARES,
    Backend,
    Calibration,
    Cluster,
    Device,
    Disk,
    Link,
)
from longshift.cluster.curves import Curve, SampledSizes
from longshift.errors import UsageError, did_you_mean

FORMAT = "longshift cluster"
VERSION = 1


def presets() -> tuple[str, ...]:
    """Names of the machines that come with Longshift."""
    folder = resources.files("longshift.cluster") / "presets"
    return tuple(
        sorted(
            file.name.removesuffix(".json")
            for file in folder.iterdir()
            if file.name.endswith(".json")
        )
    )


def preset(name: str) -> Cluster:
    """A machine that comes with Longshift. Raises UsageError that names the nearest."""
    names = presets()
    if name.lower() not in names:
        raise UsageError(f"preset {name!r} does not exist{did_you_mean(name.lower(), names)}")
    file = resources.files("longshift.cluster") / "presets" / f"{name.lower()}.json"
    return _read(file.read_text(encoding="utf-8"), f"preset {name}")


def fingerprint(facts: Mapping[str, object]) -> str:
    """Of hardware and software: equal facts, equal fingerprint."""
    return hashlib.sha256(json.dumps(dict(facts), sort_keys=True).encode()).hexdigest()[:16]


def figures(profile: Cluster) -> str:
    """Of what is known of a machine without its calibration: equal figures, equal fingerprint."""
    return fingerprint(encode(replace(profile, calibration=None)))


def load(path: Path, facts: Mapping[str, object] | None = None) -> Cluster:
    """The profile in a file; with `facts`, only one of the machine that they describe. Raises
    UsageError."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UsageError(
            f"{path} does not exist; presets are {', '.join(presets())}, and longshift profile -o"
            " writes a file"
        ) from None
    except (OSError, UnicodeDecodeError) as fault:
        raise UsageError(f"{path} cannot be read: {fault}") from None
    profile = _read(text, str(path))
    if facts is not None and fingerprint(profile.facts) != fingerprint(facts):
        keys = [
            key for key in {**facts, **profile.facts} if facts.get(key) != profile.facts.get(key)
        ]
        differences = "; ".join(
            f"{key} {profile.facts.get(key)!r}, here {facts.get(key)!r}" for key in keys
        )
        raise UsageError(
            f"{path} was measured elsewhere ({differences}); measure here with: longshift profile"
            " --fresh"
        )
    return profile


def save(profile: Cluster, path: Path) -> None:
    """Write a file that appears whole or not at all. Raises UsageError where it cannot be
    written."""
    body = encode(profile)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, building = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(
                    json.dumps(
                        {"format": FORMAT, "version": VERSION, "sha256": _digest(body), **body},
                        indent=1,
                    )
                    + "\n"
                )
            os.replace(building, path)
        except BaseException:
            os.unlink(building)
            raise
    except OSError as fault:
        raise UsageError(f"{path} cannot be written: {fault.strerror}") from None


def _digest(body: object) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def encode(profile: Cluster) -> dict[str, Any]:
    """A cluster in JSON values."""
    body = asdict(profile)
    if profile.calibration is None:
        del body["calibration"]
    body["curves"] = {name: asdict(curve) for name, curve in sorted(profile.curves.items())}
    return json.loads(json.dumps(body))


def _read(text: str, name: str) -> Cluster:
    """A cluster from JSON; `name` stands for the file in faults."""
    try:
        document = json.loads(text)
    except json.JSONDecodeError as fault:
        raise UsageError(
            f"{name} is damaged: not JSON ({fault}); measure again with: longshift profile --fresh"
        ) from None
    if not isinstance(document, dict) or document.pop("format", None) != FORMAT:
        raise UsageError(f"{name} is not a profile: it does not begin with format {FORMAT!r}")
    version = document.pop("version", None)
    if version != VERSION:
        raise UsageError(
            f"{name} has version {version}, and this Longshift reads {VERSION}; measure again with:"
            " longshift profile --fresh"
        )
    digest = document.pop("sha256", None)
    if document.get("origin") != "published" and digest != _digest(document):
        raise UsageError(
            f"{name} is damaged or was edited: its SHA-256 differs; measure again with: longshift"
            " profile --fresh"
        )
    try:
        profile = decode(document)
    except (UsageError, KeyError, TypeError, ValueError, AttributeError) as fault:
        raise UsageError(f"{name} is damaged: {type(fault).__name__}: {fault}") from None
    if profile.calibration is not None and profile.calibration.fingerprint != figures(profile):
        raise UsageError(
            f"{name} has a calibration of other figures than its own; write it again with:"
            f" longshift calibrate RUN -o {name}"
        )
    return profile


def decode(body: dict[str, Any]) -> Cluster:
    """Inverse of `encode`. Raises one of several errors for what cannot be a cluster."""
    decoders: dict[str, Callable[[Any], Any]] = {
        "device": lambda value: Device(**value),
        "disk": lambda value: None if value is None else Disk(**value),
        "links": lambda value: {level: Link(**link) for level, link in value.items()},
        "curves": decode_curves,
        "backends": lambda value: tuple(Backend(**backend) for backend in value),
        "calibration": Calibration.from_json,
    }
    values = {
        key: decoders[key](value) if key in decoders else value for key, value in body.items()
    }
    profile = Cluster(**values)
    _check(profile)
    return profile


def decode_curves(values: Mapping[str, dict[str, Any]]) -> dict[str, Curve]:
    """Curves by name, from JSON values."""
    curves = {}
    for name, value in values.items():
        axes = tuple(
            SampledSizes(**{**axis, "sizes": tuple(axis["sizes"])}) for axis in value["axes"]
        )
        curves[name] = Curve(axes, tuple(value["seconds"]), tuple(value["spread"]))
    return curves


def constants(profile: Cluster) -> dict[str, float]:
    """Every constant by its path, such as `device.flops_per_s.bf16` or `links.node.latency_s`."""
    body = encode(profile)
    tree = {key: body[key] for key in ("device", "host_bytes", "disk", "links", "shares")}
    flat: dict[str, float] = {}

    def walk(node: object, path: str) -> None:
        if isinstance(node, dict):
            for key, value in node.items():
                walk(value, f"{path}.{key}" if path else key)
        elif isinstance(node, int | float):
            flat[path] = node

    walk(tree, "")
    return flat


def _check(profile: Cluster) -> None:
    """Raises ValueError for a cluster that cannot be."""

    def is_positive(value: float) -> bool:
        return math.isfinite(value) and value > 0

    numbers = constants(profile)
    wrong = [path for path, value in numbers.items() if not is_positive(value)]
    wrong += [f"links.{level}" for level in profile.links if level not in LEVELS]
    wrong += [f"shares.{name}" for name in SHARES if not 0 < profile.shares.get(name, 0) <= 1]
    for name in ("nodes", "devices_per_node"):
        count = getattr(profile, name)
        if not (isinstance(count, int) and count > 0):
            wrong.append(name)
    if profile.calibration is not None:
        values = {**profile.calibration.constants, "band": profile.calibration.band}
        for name, value in values.items():
            if name not in (*MOVED, "band") or not is_positive(value):
                wrong.append(f"calibration.{name}")
    if profile.origin not in ("measured", "published"):
        wrong.append("origin")
    if wrong:
        raise ValueError(f"impossible: {', '.join(wrong)}")
    if unsourced := sorted(set(numbers) - set(profile.sources)):
        raise ValueError(f"no source for {', '.join(unsourced)}")
