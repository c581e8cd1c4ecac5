"""What the code that runs needs: it is played on tensors that have shapes and no storage, and what
it does is written down."""
