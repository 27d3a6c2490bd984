"""The same rounds over a network: an engine whose orders travel as messages, and the nodes that
answer."""
