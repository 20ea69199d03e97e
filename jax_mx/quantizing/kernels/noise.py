"""The numbers in `reference.noise`, for kernels."""

FACTORS = (0x85EBCA6B, 0xC2B2AE35)  # of `_mixed`


def step(j: int) -> int:
    """The word that is combined with a block's mixed seed for the j-th word of its noise.

    `_mixed` begins and ends with x ^ x >> 16, which is its own inverse. Between two calls these
    steps cancel, except on the word that is combined there: `step` returns it shifted.
    """
    product = j * 0x9E3779B9 % 2**32
    return product ^ product >> 16
