"""The numbers in `reference.noise`, for kernels."""

FACTORS = (0x85EBCA6B, 0xC2B2AE35)  # of `_mixed`


def step(j: int) -> int:
    """What a block's mixed seed is combined with for the j-th word of its noise, less a shift.

    `_mixed` begins and ends with x ^ x >> 16. In a row these take each other back, but for what
    comes between them, and what comes in, which stays shifted.
    """
    found = j * 0x9E3779B9 % 2**32
    return found ^ found >> 16
