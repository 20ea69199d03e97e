"""Import this first, in a process of its own: jax_mx is then the package without its ops.

Its modules that are imported afterwards need no kernels; `jax_mx.quantizing.facts`, and the words
of `jax_mx.launch`, need no JAX either.
"""

import sys
import types
from importlib.util import find_spec

if "jax_mx" in sys.modules:
    raise ImportError("jax_mx has been imported whole already")
folders = [*find_spec("jax_mx").submodule_search_locations]
for name, below in (("jax_mx", ""), ("jax_mx.launch", "/launch")):
    package = types.ModuleType(name)
    package.__path__ = [folder + below for folder in folders]
    sys.modules[name] = package
