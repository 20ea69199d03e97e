"""See `jax_mx.command.report`."""

import sys

if __name__ == "__main__":
    try:
        from jax_mx.command.report import main

        sys.exit(main())
    except KeyboardInterrupt:  # before or after what `main` looks after
        sys.exit(130)
