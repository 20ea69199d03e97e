"""How an operation becomes a call in XLA: primitives, which kernel serves, where it comes from."""
