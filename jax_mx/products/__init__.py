"""Products of MX arrays: recipes, `dot_general` with its derivative, implementations, choices."""
