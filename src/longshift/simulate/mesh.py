"""Meshes: degrees of the axes that share a pack, of one layout or of arrays of candidates."""

from functools import cached_property
from typing import Any

import numpy as np

from longshift.cluster.cluster import Number
from longshift.layout import axes
from longshift.layout.axes import Degrees


class Mesh(Degrees[Number]):
    """Degrees of the axes that share a pack, fastest first,
    numbers or arrays: 1 where left out. Immutable."""

    def __init__(self, *degrees: Number):
        names = [axis.name for axis in axes.token_axes()]
        self.degrees: dict[str, Number] = {**dict.fromkeys(names, 1), **dict(zip(names, degrees))}

    @classmethod
    def of(cls, layout: Degrees[Any]) -> "Mesh":
        """The mesh of a layout, or of arrays of layouts."""
        return cls(*(layout.degree(axis.name) for axis in axes.token_axes()))

    def degree(self, axis: str) -> Number:
        """Raises KeyError for an axis that shares no pack: a mesh knows no replicas and stages."""
        return self.degrees[axis]

    @cached_property
    def distinct(self) -> tuple[list[tuple[int, ...]], np.ndarray | int]:
        """The different meshes among these, and which of them each is."""
        columns = np.broadcast_arrays(*self.degrees.values())
        if columns[0].ndim == 0:
            return [tuple(int(column) for column in columns)], 0
        # A mesh as one number: numpy finds different numbers faster than different rows.
        codes = np.zeros(columns[0].shape, np.int64)
        for column in columns:
            codes = codes * int(column.max(initial=1) + 1) + column.astype(np.int64)
        first, index = np.unique(codes, return_index=True, return_inverse=True)[1:]
        meshes = [tuple(int(column.flat[place]) for column in columns) for place in first]
        return meshes, index.reshape(codes.shape)
