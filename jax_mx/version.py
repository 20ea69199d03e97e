"""The version of the installed distribution; pyproject.toml is the one place that states it."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("jax-mx")
except PackageNotFoundError:  # a source tree on sys.path that is not installed
    __version__ = "0+unknown"
