"""Files, errors, signals and user modules: helpers that every folder may use."""
