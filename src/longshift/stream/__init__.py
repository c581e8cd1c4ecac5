"""What waits for its backward: recomputation, tiers of memory, and sequences in chunks."""
