"""Compiles kernels for another process: `python worker.py FD`.

Reads lines of JSON from standard input, {"variant": ..., "arch": arch}, and writes one for each to
the file descriptor FD: {"image": base64, "facts": ...} or {"error": sentence}. Ends with its input.
A variant is a `Binary` in base64, as pickle has it.
"""

import base64
import hashlib
import json
import os
import pickle
import re
import sys
import textwrap
import types
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parents[1]


def without_jax() -> None:
    """Makes `jax_mx.facts` and `jax_mx.kernels` importable without the package's __init__.

    That would import JAX, which a compiler does not need and a build may not have.
    """
    package = types.ModuleType("jax_mx")
    package.__path__ = [str(PACKAGE)]
    sys.modules["jax_mx"] = package
    here = str(PACKAGE / "launch")  # has folders that are called as the DSLs are
    sys.path[:] = [path for path in sys.path if path != here]


def compiled(variant, arch: str) -> tuple[bytes, dict[str, Any]]:
    """The binary, and its facts: name, abi, key, sha256, launches."""
    from jax_mx.launch.content import key_of
    from jax_mx.launch.rule import ABI

    if variant.implementation == "cutedsl":
        from jax_mx.kernels.cutedsl import compile as backend
    else:
        from jax_mx.kernels.flydsl import compile as backend
    image, facts = backend.compile_variant(variant, arch)
    names = {
        "name": f"{variant.name}.{arch}",
        "abi": ABI,  # of the launch rules
        "key": key_of(variant, arch),
        "sha256": hashlib.sha256(image).hexdigest(),
    }
    return image, {**names, **facts}


def main(descriptor: str) -> None:
    """Answers requests until there are no more."""
    without_jax()
    with os.fdopen(int(descriptor), "w") as answers:
        for line in sys.stdin:
            request = json.loads(line)
            try:
                variant = pickle.loads(base64.b64decode(request["variant"]))
                image, facts = compiled(variant, request["arch"])
                answer = {"image": base64.b64encode(image).decode(), "facts": facts}
            except Exception as error:
                text = re.sub(r"\x1b\[[0-9;]*m", "", f"{type(error).__name__}: {error}")
                answer = {"error": textwrap.shorten(text, 300)}
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
