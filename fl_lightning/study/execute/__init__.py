"""A study carried out: cells, processes, displays."""
