"""What `make gpu-check` does on a GPU: `python -m ringspun.testing.gpu_check`. PyTorch, NumPy and jaxtyping only.

certifying.py  rings of virtual ranks on one device, held against float64 there, and against one call's error
timing.py      the same rings timed beside one call, with their peak memory and what merging costs
memory.py      what that peak should be
results.py     what came of it, as a page and as data
"""
