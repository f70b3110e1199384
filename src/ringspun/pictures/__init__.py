"""Pictures: masks, layouts, schedules, balance, memory and time, drawn from the data that the ring runs by.

A `Scene` is what is drawn. `figures` are the numbers of each picture, plain frozen data; what draws them (terminal,
matplotlib, a page) computes nothing. Neither PyTorch nor JAX is needed.
"""

from ringspun.pictures.scene import Scene

__all__ = ["Scene"]
