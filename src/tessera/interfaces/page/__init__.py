"""What the report is made of: a run's record, words for its figures, sections, style."""
