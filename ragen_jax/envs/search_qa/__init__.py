"""SearchQA: questions whose answers are found by searching a generated encyclopedia."""
