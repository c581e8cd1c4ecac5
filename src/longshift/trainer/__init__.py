"""A run: admission, the training loop, trials of layouts, metrics, trackers, launchers, and the run
folder."""
