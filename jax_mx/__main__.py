"""See `jax_mx.command.report`."""

import sys

from jax_mx.command.report import main

if __name__ == "__main__":
    sys.exit(main())
