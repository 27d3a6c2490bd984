"""Several processes of one run: starting them, and exchanging data between them."""
