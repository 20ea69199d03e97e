"""The command line, python -m benchmarks: see runner.py."""

import sys

from benchmarks.runner import run

if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
