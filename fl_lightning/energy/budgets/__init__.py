"""Networks whose layers are switched under an energy budget."""
