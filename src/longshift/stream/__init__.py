"""Tiers of memory, where activations wait for their backward, and the trace of what moves."""
