"""What a run leaves on disk and goes on from, whole or in shards; and what `from_pretrained` reads.

    checkpointing.py  checkpoints written whole or not at all; manifests.py: what is in them
    shards.py         tensors cut over ranks, whole again; sharded.py: checkpoints written by all ranks together
    saving.py         what a run saves, and when; resume.py: where it goes on
    saved_model.py    a model as a folder for `from_pretrained`; export.py: a checkpoint as one

Nothing is imported here.
"""
