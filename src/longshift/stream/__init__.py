"""Streaming: sequences that no device holds at once."""
