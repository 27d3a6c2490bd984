"""Text: what is at hand on every machine, tokens, instruction records, and federations of them."""
