"""A layout composed into a step, and steps into a run."""
