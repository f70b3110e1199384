"""What is minimised: a rank's share of a mean over all ranks' targets, and what is counted beside it.

    loss.py           the share, in chunks; of several tokens ahead
    chunked_loss.py   the same of a linear head, without its logits
    causal_lm.py      the same of any Hugging Face causal language model
    targets.py        labels of several tokens ahead, shifted and cut
    mean.py           what the mean is over: targets of ring, replicas and micro-batches
    metrics.py        accuracy, entropy, perplexity over exactly the loss tokens

Nothing is imported here.
"""
