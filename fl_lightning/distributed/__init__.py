"""Several processes of one run: how they start, and what they exchange."""
