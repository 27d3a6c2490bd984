"""What a study says: comparisons, verdicts, tables, figures and documents."""
