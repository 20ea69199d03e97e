"""The one table of activations, which stand between the two products of an MLP.

The result is act(gate) * up * weight, or act(x) * weight of an activation without a gate. A row of
`UNARY` says how act and its slope are rounded; quantizing/reference/activations.py has the
formulas, quantizing/kernels/cutedsl/activations.py has two of them for kernels.

The quantized floats have gate_up's dtype. From bfloat16 all implementations have to agree on every
bit, whatever exponential function a chip has. So act(gate) is rounded to few bits before it is
multiplied: no bfloat16 gate is so close to a tie of that rounding that an error of a few float32
units in the last place decides. A search found the places of ties that allow this;
tests/test_activations.py measures the distances. Then act(gate) has 9 bits and up has 8, whose
product is exact in float32. From float16 and float32, x sigmoid(z) is computed in float64. Its
steps, `EXP`, have one result each, whether an instruction joins a product and a sum or not.

Slopes from bfloat16 have such a rounding too, of 8 bits. A slope, up, and the gradient of the
result have 24 bits together, so their product in the derivative of `gated` is exact.
"""

import dataclasses
import math
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Rounding:
    """To few bits of a float32's mantissa.

    Attributes:
      kept: how many bits stay behind the leading one.
      up: an addend of a number's bits before the others are cut off; half a `cell` would round to
        nearest.
    """

    kept: int
    up: int

    @property
    def cell(self) -> int:
        """The distance of what stays, as float32 bits are counted."""
        return 1 << (23 - self.kept)

    @property
    def mask(self) -> int:
        """The bits that stay."""
        return 0xFFFFFFFF & -self.cell


@dataclasses.dataclass(frozen=True)
class Unary:
    """The roundings of an activation's function of the gate.

    Attributes:
      part: the rounding of act(gate) from bfloat16; None where float32 has it exactly.
      slope: the rounding of its derivative; None where float32 has it exactly.
    """

    part: Rounding | None = None
    slope: Rounding | None = None


UNARY: Mapping[str, Unary] = {
    "silu": Unary(Rounding(8, 16913), Rounding(7, 32485)),  # x sigmoid(x); arXiv 1702.03118
    "sharp_silu": Unary(Rounding(8, 17772), Rounding(7, 37969)),  # x sigmoid(1.702 x); 1606.08415
    "gelu": Unary(Rounding(8, 17729), Rounding(7, 28117)),  # by tanh; likewise
    "gelu_erf": Unary(Rounding(8, 14279), Rounding(7, 28864)),  # x Phi(x); likewise
    "relu": Unary(),
    "relu2": Unary(),  # relu(x)^2; arXiv 2109.08668
    "identity": Unary(),
}
SHARPNESS = 1.702  # of sharp_silu
TANH, CUBE = 2 * math.sqrt(2 / math.pi), 0.044715  # gelu is x sigmoid(TANH (x + CUBE x^3))
# gelu_erf in float32: Phi(-x) = exp(-x^2 / 2) t P(t), t = 1 / (1 + NEAR x), x >= 0, within 2^-24
# of it up to 14. P's coefficients, the highest first; at x = 0 float32 makes them exactly 1 / 2.
NEAR = 0.35
TAIL = (-0.029544999822974205, 0.14585642516613007, -0.25947487354278564, 0.16329829394817352,
        -0.025816861540079117, 0.10659195482730865, 0.11957551538944244, 0.13989484310150146,
        0.13961972296237946)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Exponential:
    """The steps of exp(-a), a >= 0, in float64: with a = n ln2 + r it is 2^-n exp(-r).

    Each sum adds to an exact product, or to a product whose last bits a mask of the float64's bits
    has removed. To begin with, r and each sum keep the bits of `few`.

    Attributes:
      log2e: n is a times this, rounded to nearest.
      ln2: of few bits, so that n times this is exact.
      few: the mask of 26 bits of a mantissa; the product of two such numbers is exact.
      most: the mask of all bits except the last one.
      inner: the coefficients of r^7, r^6 ..., r^3 in exp(-r); their sums have few bits.
      outer: the coefficients of r^2, r and 1; their products lack the last bit. The result is
        within 2^-34 of exp(-r).
      far: where a is more than this, exp(-a) counts as 0.
    """

    log2e: float = 1 / math.log(2)
    ln2: float = float.fromhex("0x1.62e42fefa38p-1")
    few: int = 0xFFFFFFFF_F8000000
    most: int = 0xFFFFFFFF_FFFFFFFE
    inner: tuple[float, ...] = (-0.00019790346, 0.001394466025774266, -0.008333497069589881,
                                0.04166629493687885, -0.1666666586893516)  # fmt: skip
    outer: tuple[float, ...] = (0.5000000067685838, -1.0, 1.0)
    far: float = 200.0


EXP = Exponential()


@dataclasses.dataclass(frozen=True)
class Activation:
    """One row.

    Attributes:
      unary: the function of the gate, a name of `UNARY`.
      has_gate: whether a second half, up, multiplies that.
      limit: where the gate is cut off from above, and up from both sides; None: nowhere.
      shift: an addend of up, behind the limit.
    """

    unary: str
    has_gate: bool = True
    limit: float | None = None
    shift: float = 0.0

    @property
    def rounding(self) -> Unary:
        """How what follows from the gate alone is rounded."""
        return UNARY[self.unary]


ACTIVATIONS: Mapping[str, Activation] = {
    "swiglu": Activation("silu"),  # arXiv 2002.05202, like the next four
    "geglu": Activation("gelu"),
    "geglu_erf": Activation("gelu_erf"),
    "reglu": Activation("relu"),
    "bilinear": Activation("identity"),
    "reglu2": Activation("relu2"),
    # openai/gpt-oss, gpt_oss/torch/model.py
    "gpt_oss": Activation("sharp_silu", limit=7.0, shift=1.0),
    **{name: Activation(name, has_gate=False) for name in UNARY if name != "sharp_silu"},
}
GATED: tuple[str, ...] = tuple(name for name, row in ACTIVATIONS.items() if row.has_gate)
