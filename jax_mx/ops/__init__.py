"""The public operations: they check a caller's arguments and make a plan of them."""
