"""What a step takes, without running it: seconds of operations and of a step on the clock, and
their calibration."""
