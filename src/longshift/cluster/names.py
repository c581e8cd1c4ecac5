"""A cluster as a person names it on the command line, and the network between its nodes.

    h100            one node of the preset
    64xH100         so many devices: 8 nodes of 8; fewer than a node has are one smaller node
    2x8xh100        nodes x devices of each x preset
    ./here.json     what `longshift profile -o here.json` measured, as it is

A word that is a preset's name is the preset; a file of the same name is `./h100`.
"""

import re
from dataclasses import replace
from pathlib import Path

from longshift.cluster.cluster import Cluster
from longshift.cluster.files import load, preset, presets
from longshift.errors import UsageError, did_you_mean

BITS = {"G": 1e9, "T": 1e12}


def cluster(text: str, fabric: str | None = None) -> Cluster:
    """The cluster of that name; `fabric`: what all network cards of a node carry together, each
    way, such as 400G. Raises UsageError."""
    machine = _shaped(text)
    return machine if fabric is None else with_fabric(machine, fabric)


def _shaped(text: str) -> Cluster:
    counts, name = re.fullmatch(r"((?:\d+x)*)(.*)", text, re.IGNORECASE | re.DOTALL).groups()  # pyright: ignore
    if name.lower() not in presets() and (
        Path(text).is_file() or not re.fullmatch(r"[\w-]*", name)
    ):
        if counts and not Path(text).exists() and Path(name).is_file():
            raise UsageError(f"{text}: a profile says its own nodes and devices; write {name}")
        return load(Path(text))
    machine = _preset(text, counts, name)
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


def _preset(text: str, counts: str, name: str) -> Cluster:
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
