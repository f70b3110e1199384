"""Training on long sequences: usable piece by piece, or all at once by ``ringspun train``.

    config.py         what a run is, read from TOML; sections.py: tables of one, and what is wrong with them
    stages.py         what holds in each stage of it
    recipe.py         what a config cannot say: functions of a Python file
    init.py           a Hugging Face checkpoint to start from
    data.py           text files -> byte tokens -> sequences of joined documents
    sources.py        documents by index: lists, text files, JSON lines, Parquet, data sets
    samples.py        a row -> tokens and labels, every field alike
    conversations.py  messages -> tokens, by chat template; the assistant's are learnt
    packing.py        which documents make one sequence, and what becomes of those that are too long
    collate.py        documents -> the batch of a language model -> one rank's shard and plan
    stream.py         all documents as one resumable stream of sequences
    contents.py       what is in those files: checksums, compared on resume and when they are read
    rope/             rotary frequencies of every scaling type, equal to Transformers'
    rotary.py         cosines, sines and rotations of tensors by them
    fixed_rope.py     a Hugging Face model's rotations, fixed for a length that all ranks know
    context_schedule.py  contexts that grow in stages
    model.py          the model of a config, a checkpoint or a recipe, and its loss on one rank's shard
    loss.py           a rank's share of the mean loss, in chunks; of several tokens ahead
    chunked_loss.py   the same of a linear head, without its logits
    causal_lm.py      the same of any Hugging Face causal language model
    blockwise.py      token-wise functions a block of tokens at a time, forward and backward
    blockwise_layer.py  a transformer layer of them
    decoder_blocks.py  the feed-forward layers of any Hugging Face decoder, run so
    targets.py        labels of several tokens ahead, shifted and cut
    mean.py           what the mean is over: targets of ring, replicas and micro-batches
    metrics.py        accuracy, entropy, perplexity over exactly the loss tokens
    gradients.py      the factor of DDP and FSDP; norm and clipping over meshes
    recompute.py      activation checkpointing by policy: what is kept of a layer, what runs again
    meshes.py         the ranks as a mesh of four dimensions, and which of them does what
    sharding.py, wrapping.py  who holds the weights; DDP and FSDP2 on such a mesh
    gradient.py       one gradient of all ranks' shares, whoever sums it
    mesh.py           the flat gradient, its one all-reduce, and the check for NaN and Inf
    optimizer.py      AdamW, or a recipe's own, and its learning rate
    loop.py           the training loop, stage after stage
    resume.py, saving.py  where a run goes on, and what it saves
    held_out.py       the loss at all lengths where stages switch
    faults.py         the first module or parameter of a NaN
    dry_run.py        memory and time of each stage, foreseen
    checkpointing.py  checkpoints written whole or not at all; manifests.py: what is in them
    shards.py, sharded.py  the same of tensors cut over ranks, by all ranks together
    saved_model.py, export.py  a model, a checkpoint as a folder for `from_pretrained`
    output.py         the output folder: checked, locked, moved aside
    log.py            one line a step, which a full disk only delays
    report.py         progress bar, log, TensorBoard, loss curve
    meter.py          what a step took: time, MFU, how long ranks waited
    run_page.py       a run's folder as a page of curves, stage by stage
    proof.py          ring against one process: loss, every gradient, attention memory
    launch.py         starts the local ranks, or joins a job

Nothing is imported here: each piece brings only what it needs.
"""
