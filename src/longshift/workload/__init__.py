"""Documents to packs to shares; nothing dropped. Imports no torch."""
