"""CUDA graphs, seats and side streams. No card has run them yet: opt in with ``--trainer.cuda_graphs
true``."""
