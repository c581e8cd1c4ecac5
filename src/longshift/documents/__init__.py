"""Files to token cache to the tensors of a micro-batch."""
