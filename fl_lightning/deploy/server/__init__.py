"""The server's half of a deployment: an engine whose clients are on nodes, and the job that it runs
in."""
