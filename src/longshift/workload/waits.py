"""How long one rank may have to wait for another inside a step: what a collective's timeout must
allow.

    replica 0   short documents ░░░░ waits ........................ reduce
    replica 1   one document of 1M tokens ░░░░░░░░░░░░░░░░░░░░░░░░░ reduce

Documents are dealt dearest first to the replica with the least to do (`workload.packs.shares`), so
a replica's share of a group costs at most the mean of the replicas and one document of the group's
longest.
"""

from collections.abc import Mapping, Sequence

from longshift.spec.model import ModelSpec
from longshift.workload.groups import Edge
from longshift.workload.packs import cost

LEAST_S = 600.0
SLOW_FLOPS: Mapping[str, float] = {"cpu": 2e9, "cuda": 1e13}
"""Model FLOP/s that a rank is sure to reach, by type of its device: about a tenth of what a CPU
core multiplies in float32, and of what a GPU of 2018 multiplies in 16 bits. Recomputation, waiting
for a tier and small matrices slow a rank down by less. A timeout that is too long delays the news
of a rank that hangs (one that dies is noticed at once); one that is too short ends a good run."""


def timeout_s(
    spec: ModelSpec, edges: Sequence[Edge], max_len: int, tokens_per_step: int, flops_per_s: float
) -> float:
    """Seconds after which a collective fails: LEAST_S, or more where the slowest replica of a step
    may compute for longer.

    Stages of a pipeline do not shorten one pack.
    """
    longest_flops = 0.0
    mean_flops = 0.0
    for edge in edges:
        length = min(edge.upto, max_len)
        document_flops = cost([length], spec) / edge.use.sequence

        # Groups that share copies of the weights do not wait for each other, so their longest
        # documents add up.
        longest_flops += document_flops
        # The last document of a step may exceed its tokens by max_len.
        group_flops = document_flops / length * (tokens_per_step + max_len) / edge.use.dp
        mean_flops = max(mean_flops, group_flops)
    return max(LEAST_S, (longest_flops + mean_flops) / flops_per_s)
