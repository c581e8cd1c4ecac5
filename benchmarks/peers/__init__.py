"""The systems that `static.py` compares, one file each: `build(world, trial, variant)` gives a rank's training step."""
