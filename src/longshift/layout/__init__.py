"""Which rank holds what, and why a layout is not legal. Imports no torch."""
