"""How well a model uses a long context: what it finds in it, and how well it predicts with it.

    exam.py        a document and questions about it, as tokens
    lines.py       numbered lines with values; what is the value of line 0417?
    passkey.py     one number hidden in filler text
    branches.py    the mask by which many questions are asked at once, none seeing another
    judged.py      what is asked of a model: logits of some tokens of a rank's shard
    retrieval.py   exact answers, over lengths and depths
    perplexity.py  the loss by position, with all of the context and with a part of it
    heatmap.py     both as figures
    texts.py       held-out documents as sequences of one length
    subject.py     a checkpoint, a run or a Hugging Face model, ready to be asked
    job.py         all of it, on one process or on the ranks of a ring: what `ringspun eval` does

Nothing is generated: an answer is exact if each of its tokens has the largest logit where those before it were given,
which is when greedy decoding would give exactly it. So a sharded forward pass is all that is needed, and no cache.
"""
