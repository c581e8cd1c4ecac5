"""What runs have done, as one page."""
