"""Files and modules: what every folder may use."""
