"""Processes, groups and differentiable collectives."""
