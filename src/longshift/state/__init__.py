"""Home and its three verbs; optimizer, precision, checkpoints."""
