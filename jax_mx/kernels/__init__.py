"""Build time only: kernel sources and what compiles them. Nothing that is installed imports this."""
