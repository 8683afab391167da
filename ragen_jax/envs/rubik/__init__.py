"""The 2 x 2 x 2 Rubik's cube: rules, geometry and solver."""
