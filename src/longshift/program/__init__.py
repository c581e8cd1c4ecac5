"""One rank's training step as a list of operations, and what is told from it without playing it.
Imports no torch."""
