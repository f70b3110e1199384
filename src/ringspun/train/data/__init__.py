"""Documents as sequences: read, made tokens, packed, dealt out, resumable.

    config.py         the `[data]` table; opening.py: what it names, opened
    text.py           text files -> byte tokens -> sequences of joined documents; what sequences are (`Sequences`)
    sources.py        documents by index: lists, text files, JSON lines, Parquet, data sets; views.py: some of them
    samples.py        a row -> tokens and labels, every field alike; vocabulary.py: whether its tokens are a model's
    conversations.py  messages -> tokens, by chat template; the assistant's are learnt
    packing.py        which documents make one sequence, and what becomes of those that are too long
    collate.py        documents -> the batch of a language model -> one rank's shard and plan
    stream.py         all documents as one resumable stream of sequences; walk.py: where it is
    packed.py         that stream as the sequences of `ringspun train`
    contents.py       what is in the files: checksums, compared on resume and when they are read

Nothing is imported here.
"""
