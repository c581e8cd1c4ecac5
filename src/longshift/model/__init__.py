"""The decoder in plain PyTorch; it knows no rank."""
