"""Clusters as JSON files, and as a person names them on the command line.

    h100            one node of the preset
    64xH100         so many devices: 8 nodes of 8; fewer than a node has are one smaller node
    2x8xh100        nodes x devices of each x preset
    ./here.json     what `longshift profile -o here.json` measured, as it is

A word that is a preset's name is the preset; a file of the same name is `./h100`.

A profile carries the SHA-256 of its contents. A file that is not a profile, or is damaged, is
refused with the reason; so is one whose calibration is not of its own figures.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from longshift.cluster.cluster import MOVED, SHARES, Cluster
from longshift.cluster.curves import Curve
from longshift.cluster.host import CACHE, host_facts
from longshift.errors import UsageError, did_you_mean
from longshift.files import rewrite

FORMAT = "longshift cluster"
VERSION = 1
BITS = {"G": 1e9, "T": 1e12}
PRESETS = resources.files("longshift.cluster") / "presets"


def cluster(text: str, fabric: str | None = None) -> Cluster:
    """The cluster of that name; `fabric`: what all network cards of a node carry together, each
    way, such as 400G. Raises UsageError."""
    machine = _shaped(text)
    return machine if fabric is None else with_fabric(machine, fabric)


def _shaped(text: str) -> Cluster:
    match = re.fullmatch(r"((?:\d+x)*)(.*)", text, re.IGNORECASE | re.DOTALL)
    assert match is not None  # both parts may be empty
    counts, name = match.groups()

    # 1. A file, unless a preset has its name.
    is_path = Path(text).is_file() or not re.fullmatch(r"[\w-]*", name)
    if name.lower() not in presets() and is_path:
        if counts and not Path(text).exists() and Path(name).is_file():
            raise UsageError(f"{text}: a profile says its own nodes and devices; write {name}")
        return load(Path(text))

    # 2. A preset, of so many devices, or nodes and devices of each.
    machine = _named_preset(text, counts, name)
    numbers = [int(count) for count in re.findall(r"\d+", counts)]
    if not all(numbers) or len(numbers) > 2:
        raise UsageError(
            f"{text}: write devices, as in 64x{name}, or nodes and devices of each, as in"
            f" 8x8x{name}; each at least 1"
        )
    if len(numbers) == 2:
        nodes, per_node = numbers
        if per_node > machine.devices_per_node:
            raise UsageError(
                f"{text}: a node of {name} has {machine.devices_per_node} devices; write"
                f" {nodes * per_node}x{name}"
            )
        return replace(machine, nodes=nodes, devices_per_node=per_node)
    (count,) = numbers or [machine.devices_per_node]
    per_node = min(count, machine.devices_per_node)
    if count % per_node:
        near = max(1, round(count / per_node)) * per_node
        raise UsageError(
            f"{text}: {count} devices do not fill nodes of {per_node}; write {near}x{name}"
        )
    return replace(machine, nodes=count // per_node, devices_per_node=per_node)


def _named_preset(text: str, counts: str, name: str) -> Cluster:
    """The preset of that name. Raises UsageError that names the nearest, or all of a family such as
    a100."""
    names = presets()
    if name.lower() in names:
        return preset(name)

    family = [member for member in names if member.startswith(f"{name.lower()}-")]
    if name and family:
        spellings = " or ".join(counts + member for member in family)
        raise UsageError(f"{text}: {name} is {' or '.join(family)}; write {spellings}")
    near = did_you_mean(name.lower(), names)
    raise UsageError(
        f"{text}: no preset and no file{near}; a cluster is 64xh100, 8x8xh100 or a file of"
        " longshift profile -o"
    )


def with_fabric(machine: Cluster, fabric: str) -> Cluster:
    """The cluster with another network; curves between nodes are dropped.

    `fabric`: bits a second of each node, each way, shared evenly by its devices. Raises UsageError.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([GT])", fabric.strip(), re.IGNORECASE)
    if not match or not (bits_per_s := float(match[1]) * BITS[match[2].upper()]):
        raise UsageError(
            f"fabric {fabric!r}: write the bits a second of a node's network cards together, as in"
            " 400G or 3.2T"
        )
    if "network" not in machine.links:
        raise UsageError(
            f"{machine.name} was measured on one node and knows no network: leave the fabric out,"
            " or name a preset"
        )
    path = "links.network.bytes_per_s"
    per_node = machine.devices_per_node
    link = replace(machine.links["network"], bytes_per_s=bits_per_s / 8 / per_node)
    curves = machine.curves.items()
    return replace(
        machine,
        links={**machine.links, "network": link},
        sources={**machine.sources, path: f"given: {fabric} a node, for {per_node} devices"},
        curves={name: curve for name, curve in curves if not name.endswith(" network")},
    )


def presets() -> tuple[str, ...]:
    """Names of the machines that come with Longshift."""
    return tuple(sorted(Path(file.name).stem for file in PRESETS.iterdir()))


def preset(name: str) -> Cluster:
    """A machine that comes with Longshift, one of `presets`."""
    file = PRESETS / f"{name.lower()}.json"
    return _read(file.read_text(encoding="utf-8"), f"preset {name}")


def fingerprint(facts: Mapping[str, object]) -> str:
    """Of hardware and software: equal facts, equal fingerprint."""
    return _digest(dict(facts))[:16]


def figures(profile: Cluster) -> str:
    """Of what is known of a machine without its calibration: equal figures, equal fingerprint."""
    return fingerprint(encode(replace(profile, calibration=None)))


def load(path: Path) -> Cluster:
    """The profile in a file. Raises UsageError."""
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
    if profile.nodes > 1 and "network" not in profile.links:
        raise UsageError(
            f"{path} has {profile.nodes} nodes and knows no network between them: write"
            " links.network, or name a preset"
        )
    return profile


def profile_of_host(
    per_node: int,
    nodes: int = 1,
    kind: str | None = None,
    cache: Path = CACHE,
    cores: int | None = None,
) -> Cluster | None:
    """The profile of this machine that serves best for `nodes` of it with `per_node` ranks each;
    None where it was not measured.

    `kind`: of device, cpu or cuda; a GPU's before a CPU's where None. `cores`: as of `host_facts`.
    Software and numbers of threads may differ from those of now: this is for what they hardly
    change, such as links. Files that are damaged are passed over.
    """
    facts = host_facts(cores)
    of_host = []
    # In the order of their names, so that of equal ones the same is chosen each time.
    for file in sorted((cache.expanduser() / "profiles").glob("*.json")):
        with suppress(UsageError):
            profile = load(file)
            is_of_host = facts.items() <= profile.facts.items()
            if is_of_host and kind in (None, profile.device.kind):
                of_host.append(profile)

    def suitability(profile: Cluster) -> tuple[bool, ...]:
        return (
            profile.device.kind == "cuda",
            profile.nodes == nodes,
            profile.devices_per_node == per_node,
            profile.facts.get("measured") == "full",
        )

    return max(of_host, key=suitability, default=None)


def save(profile: Cluster, path: Path) -> None:
    """Write a file that appears whole or not at all. Raises UsageError where it cannot be
    written."""
    body = encode(profile)
    header = {"format": FORMAT, "version": VERSION, "sha256": _digest(body)}

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        rewrite(path, json.dumps(header | body, indent=1) + "\n")
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
    # As a file gives it back, with lists for tuples: digests are of that.
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
    except (UsageError, ValueError) as fault:
        raise UsageError(f"{name} is damaged: {fault}") from None
    calibration = profile.calibration
    if calibration is not None and calibration.fingerprint != figures(profile):
        raise UsageError(
            f"{name} has a calibration of other figures than its own; write it again with:"
            f" longshift calibrate RUN -o {name}"
        )
    return profile


def decode(body: dict[str, Any]) -> Cluster:
    """Inverse of `encode`. Raises UsageError or ValueError for what cannot be a cluster."""
    try:
        profile = TypeAdapter(Cluster).validate_python(body)
    except ValidationError as fault:
        first = fault.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None

    _check(profile)
    return profile


def decode_curves(values: Mapping[str, Any]) -> dict[str, Curve]:
    """Curves by name, from JSON values."""
    return TypeAdapter(dict[str, Curve]).validate_python(values)


def constants(profile: Cluster) -> dict[str, float]:
    """Every constant by its path, such as `device.flops_per_s.bf16` or `links.node.latency_s`."""
    body = encode(profile)
    # Of parts without curves, whose points are no constants.
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
    numbers = constants(profile)
    positive = {**numbers, "nodes": profile.nodes, "devices_per_node": profile.devices_per_node}
    wrong = [f"shares.{name}" for name in SHARES if not 0 < profile.shares.get(name, 0) <= 1]
    if profile.calibration is not None:
        positive["calibration.band"] = profile.calibration.band
        # A name that no calibration may move counts as 0, which is refused.
        for name, value in profile.calibration.constants.items():
            positive[f"calibration.{name}"] = value if name in MOVED else 0.0
    wrong += [path for path, value in positive.items() if not 0 < value < math.inf]
    if wrong:
        raise ValueError(f"impossible: {', '.join(wrong)}")
    if unsourced := sorted(set(numbers) - set(profile.sources)):
        raise ValueError(f"no source for {', '.join(unsourced)}")
