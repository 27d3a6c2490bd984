"""The parts of Fed-VEMoE: which experts a client takes, and how a server's experts are born, pruned
and merged."""
