"""The node's half of a deployment: it answers messages, trains its own clients and keeps what is
theirs."""
