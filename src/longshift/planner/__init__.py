"""Choices that the cluster, the model and the lengths decide: chunks, layouts, length groups."""
