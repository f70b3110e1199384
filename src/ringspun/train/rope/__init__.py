"""Rotary position embeddings: which frequencies a model rotates by, as one frozen value per scaling type.

    Default       theta ** (-2i / D), D the rotated part of a head
    Linear        all frequencies divided by a factor (position interpolation)
    Ntk           a larger theta, fixed
    Dynamic       a larger theta that follows the length
    Yarn          fast frequencies kept, slow ones divided, a ramp between; scores get warmer
    LongRope      every frequency divided by a factor of its own; two sets, one beyond the original length
    Llama3        as Yarn, by wavelength
    Proportional  the first frequencies only, the others 0

A value reads and writes Hugging Face's `rope_parameters`, and gives the numbers that Transformers gives, in float64.
What needs the length is asked for it: there is no length that one rank could take from its own positions. NumPy only;
`ringspun.train.rope.rotary` turns tensors by it.

`base.py` has what they share, `scalings.py` the types, `reading.py` reads a config; `fixed_rope.py` fixes a
Hugging Face model's rotations for a length that all ranks know.
"""

from ringspun.train.rope.base import Rope
from ringspun.train.rope.reading import TYPES, from_config, from_parameters, head_size_of
from ringspun.train.rope.scalings import Default, Dynamic, Linear, Llama3, LongRope, Ntk, Proportional, Yarn

__all__ = [
    "TYPES",
    "Default",
    "Dynamic",
    "Linear",
    "Llama3",
    "LongRope",
    "Ntk",
    "Proportional",
    "Rope",
    "Yarn",
    "from_config",
    "from_parameters",
    "head_size_of",
]
