"""Studies: many runs planned, run, tested and compared. Reads study files and finished runs; a run
itself is the trainer's."""
