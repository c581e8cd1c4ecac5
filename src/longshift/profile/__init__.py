"""Measures the machine it runs on."""
