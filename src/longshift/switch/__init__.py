"""Which boxes move from which rank to which. Imports no torch."""
