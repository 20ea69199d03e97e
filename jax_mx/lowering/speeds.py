"""About how fast chips are, for XLA's scheduler: it compares kernels with collectives."""

from collections.abc import Mapping

# By arch, about what a large kernel reaches: TB/s of memory, then PF/s of products in bfloat16 and
# of products in FP8. H100s and H200s were measured; the others have 70 % of their data sheets', a
# family its first chip's. Where products of FP8 are not ours, the number is that of bfloat16.
SPEEDS: Mapping[str, tuple[float, float, float]] = {
    "sm_80": (1.3, 0.22, 0.22),
    "sm_89": (0.7, 0.25, 0.5),
    "sm_90a": (2.8, 0.65, 1.35),
    "sm_100f": (6.4, 1.6, 3.2),
    "sm_120f": (1.4, 0.35, 0.7),
    "gfx942": (4.2, 0.9, 0.9),
    "gfx950": (6.4, 1.6, 3.2),
}
