"""Build time only: kernel sources and what compiles them. Nothing installed imports this."""
