"""One training step on one rank: a program's operations played on tensors."""
