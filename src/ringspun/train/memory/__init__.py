"""Less of a layer kept between forward and backward: blocks of tokens, and what is computed again.

    blockwise.py        token-wise functions a block of tokens at a time, forward and backward
    blockwise_layer.py  a transformer layer of them
    decoder_blocks.py   the feed-forward layers of any Hugging Face decoder, run so
    recompute.py        activation checkpointing by policy: what is kept of a layer, what runs again

Nothing is imported here.
"""
