"""What a step takes, without running it: seconds of operations, of a step in closed form, and their calibration."""
