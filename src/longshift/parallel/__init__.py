"""One technique a file, composed over the seams of the model."""
