"""Chips by the arithmetic of their tensor cores; launch/chips.py has their names."""

# The chips whose tensor cores multiply OCP's FP8, and those that take E8M0 scales as well.
FP8 = ("sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121", "gfx950")
SCALED_DOT = ("sm_100", "sm_103", "sm_120", "sm_121", "gfx950")
# The chips whose tensor cores sum in tensor memory, by tcgen05's instructions.
TCGEN05 = ("sm_100", "sm_103")
