"""Compiles kernels for another process: `python worker.py FD`.

Reads lines of JSON from standard input, {"binary": ..., "arch": arch, "path": folders}, and writes
one for each to the file descriptor FD: {"image": base64, "facts": ...} or {"error": sentence}. Ends
with its input. A binary (binary.py) is in base64, as pickle has it; `path` has the folders that the
other process imports from, which may have grown since this one began.
"""

import base64
import hashlib
import importlib
import json
import os
import pickle
import re
import sys
import textwrap
import traceback
import types
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parents[1]
NOT_THE_AUTHORS = {"__main__", "cutlass", "flydsl", "jax_mx", *sys.stdlib_module_names}


def without_jax() -> None:
    """Makes the modules of `jax_mx` importable without the __init__ of it and of `launch`.

    These would import JAX, which a compiler does not need and a build may not have.
    """
    for name, folder in (("jax_mx", PACKAGE), ("jax_mx.launch", PACKAGE / "launch")):
        package = types.ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
    here = str(PACKAGE / "launch")  # has modules that are called as the DSLs are
    sys.path[:] = [path for path in sys.path if path != here]


def compiled(binary, arch: str) -> tuple[bytes, dict[str, Any]]:
    """The bytes of a binary, and its facts: name, abi, key, sha256, launches."""
    from jax_mx.launch.content import key_of
    from jax_mx.launch.rule import ABI

    module, _, function = binary.compiled_by.partition(":")
    image, facts = getattr(importlib.import_module(module), function)(binary, arch)
    names = {
        "name": f"{binary.name}.{arch}",
        "abi": ABI,  # of the launch rules
        "key": key_of(binary, arch),
        "sha256": hashlib.sha256(image).hexdigest(),
    }
    return image, {**names, **facts}


def sentence(error: Exception) -> str:
    """An error's message, and the line in the kernel's file that led to it."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", f"{type(error).__name__}: {error}")
    text, cause = textwrap.shorten(text, 300), error
    while cause is not None:
        for frame, line in reversed([*traceback.walk_tb(cause.__traceback__)]):
            if frame.f_globals.get("__name__", "").partition(".")[0] not in NOT_THE_AUTHORS:
                path = Path(frame.f_code.co_filename)
                return f"{text} ({path.parent.name}/{path.name}:{line})"
        cause = cause.__cause__ or cause.__context__
    return text


def main(descriptor: str) -> None:
    """Answers requests until there are no more."""
    without_jax()
    with os.fdopen(int(descriptor), "w") as answers:
        for line in sys.stdin:
            request = json.loads(line)
            try:
                sys.path += [path for path in request["path"] if path not in sys.path]
                binary = pickle.loads(base64.b64decode(request["binary"]))
                image, facts = compiled(binary, request["arch"])
                answer = {"image": base64.b64encode(image).decode(), "facts": facts}
            except Exception as error:
                answer = {"error": sentence(error)}
            print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
