"""The public operations: what a caller may ask for, checked and brought to a plan."""
