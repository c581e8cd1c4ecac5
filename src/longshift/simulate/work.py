"""Work of a turn: its seconds by kind, its launches, and how these overlap."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from longshift.cluster.cluster import Number
from longshift.layout import axes


@dataclass(frozen=True)
class Work:
    """Seconds of one turn on one rank, by kind; `kernels`: launches; `traffic_s`: of collectives
    during the turn, by axis."""

    matmul_s: Number = 0.0
    attention_s: Number = 0.0
    elementwise_s: Number = 0.0
    kernels: Number = 0.0
    traffic_s: Mapping[str, Number] = field(default_factory=dict)

    def __add__(self, addend: "Work") -> "Work":
        names = {**self.traffic_s, **addend.traffic_s}
        return Work(
            matmul_s=self.matmul_s + addend.matmul_s,
            attention_s=self.attention_s + addend.attention_s,
            elementwise_s=self.elementwise_s + addend.elementwise_s,
            kernels=self.kernels + addend.kernels,
            traffic_s={
                name: self.traffic_s.get(name, 0.0) + addend.traffic_s.get(name, 0.0)
                for name in names
            },
        )

    def times(self, factor: Number) -> "Work":
        return Work(
            matmul_s=self.matmul_s * factor,
            attention_s=self.attention_s * factor,
            elementwise_s=self.elementwise_s * factor,
            kernels=self.kernels * factor,
            traffic_s={name: seconds * factor for name, seconds in self.traffic_s.items()},
        )

    @property
    def under_attention_s(self) -> Number:
        """Seconds of traffic that goes on under attention."""
        return self._total_traffic_s(overlaps=True)

    @property
    def waited_s(self) -> Number:
        """Seconds of traffic that nothing hides."""
        return self._total_traffic_s(overlaps=False)

    def _total_traffic_s(self, overlaps: bool) -> Number:
        """Seconds of traffic of all axes that overlap attention, or of all others."""
        names = (axis.name for axis in axes.AXES if axis.overlaps == overlaps)
        return sum((self.traffic_s.get(name, 0.0) for name in names), 0.0)

    @property
    def device_s(self) -> Number:
        """Seconds that the device computes."""
        return self.matmul_s + self.attention_s + self.elementwise_s

    def compute_s(self, launch_s: Number) -> np.ndarray:
        """Seconds without traffic: the longer of the device's work and of its launches."""
        return np.maximum(self.device_s, np.asarray(self.kernels) * launch_s)

    def exposed_s(self, launch_s: Number) -> np.ndarray:
        """Seconds in Longshift: traffic exposed but for what attention hides, or what the launches
        take if that is longer."""
        exposed_s = np.maximum(0.0, np.asarray(self.under_attention_s) - self.attention_s)
        busy_s = self.device_s + self.waited_s + exposed_s
        return np.maximum(busy_s, np.asarray(self.kernels) * launch_s)
