"""A softmax of rows, by one kernel in CuTeDSL and one in FlyDSL; neither is of MX.

    python examples/row_softmax.py                # without a GPU: in the emulator of AMD's MI300X
    python examples/row_softmax.py --device       # on the device that JAX has

`softmax_kernels/` has the kernels. jax_mx/launch/README.md explains every line.
"""

import argparse
import contextlib

import jax
import jax.numpy as jnp

from jax_mx.launch import Kernel, emulate

softmax = Kernel(
    "row_softmax",
    {"cutedsl": "softmax_kernels.cutedsl", "flydsl": "softmax_kernels.flydsl"},
    reference=jax.nn.softmax,
)


def main() -> None:
    """Prints how far the kernel's results are from XLA's."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", action="store_true", help="no emulator")
    args = parser.parse_args()
    x = jax.random.normal(jax.random.key(0), (4, 7, 100))
    with contextlib.nullcontext() if args.device else emulate("gfx942"):
        calls = {
            "softmax(x)": (jax.jit(softmax), jax.nn.softmax),
            "vmap along axis 1": (
                jax.jit(jax.vmap(softmax, in_axes=1)),
                jax.vmap(jax.nn.softmax, in_axes=1),
            ),
            "its gradient": (
                jax.jit(jax.grad(lambda x: jnp.sum(softmax(x) ** 2))),
                jax.grad(lambda x: jnp.sum(jax.nn.softmax(x) ** 2)),
            ),
        }
        for name, (ours, theirs) in calls.items():
            error = jnp.abs(ours(x) - theirs(x)).max()
            print(f"{name}: {error:.1e} from XLA's")


if __name__ == "__main__":
    main()
