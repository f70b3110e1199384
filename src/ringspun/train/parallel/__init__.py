"""The ranks as a mesh: who holds the weights, and who sums the gradients.

    meshes.py    the ranks as a mesh of four dimensions, and which of them does what
    sharding.py  who may hold the weights on which mesh; wrapping.py: DDP and FSDP2 on it
    gradient.py  one gradient of all ranks' shares, whoever sums it
    scaling.py   the factor of DDP and FSDP; norm and clipping over meshes
    ranks.py     all ranks of a job: what they gather, the one all-reduce, the check for NaN and Inf

Nothing is imported here.
"""
