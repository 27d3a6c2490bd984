"""MLflow and Lightning loggers: every round of a run, and what studies add to it."""
