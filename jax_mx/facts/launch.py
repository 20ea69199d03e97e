"""placeholder"""
import numpy as np
def attributes(launch, scalars_by_name):
    entries = launch["entries"]
    scalars = [
        (size, -1, scalars_by_name[what], 0) if isinstance(what, str) else (size, *what)
        for size, what in launch["scalars"]
    ]
    numbers = {
        "align": [entry["align"] for entry in entries],
        "divide": [(i, *term) for i, entry in enumerate(entries) for term in entry["divide"]],
        "threads": [entry["threads"] for entry in entries],
        "grid": [(3 * i + axis, *term) for i, entry in enumerate(entries) for axis, *term in entry["grid"]],
        "scalars": scalars,
    }
    return {"symbols": ",".join(entry["symbol"] for entry in entries),
            **{name: np.array(value, dtype=np.int64).ravel() for name, value in numbers.items()}}
