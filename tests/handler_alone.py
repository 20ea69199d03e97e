"""Import this first, in a process of its own: jax_mx is then the package without its ops.

Its modules that are imported afterwards need no kernels; `jax_mx.facts` needs no JAX either.
"""

import sys
import types
from importlib.util import find_spec

if "jax_mx" in sys.modules:
    raise ImportError("jax_mx has been imported whole already")
package = types.ModuleType("jax_mx")
package.__path__ = [*find_spec("jax_mx").submodule_search_locations]
sys.modules["jax_mx"] = package
