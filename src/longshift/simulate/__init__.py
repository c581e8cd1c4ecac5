"""Seconds of a step without a machine: what operations cost, and a clock that plays programs on lanes."""
