"""Models, runs, records and references that several tests share."""
