"""What is trained: the model in numbers and its parameter table. Imports no torch."""
