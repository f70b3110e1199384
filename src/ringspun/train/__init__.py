"""Training on long sequences: usable piece by piece, or all at once by ``ringspun train``.

    config.py         what a run is, read from TOML; sections.py: tables of one, and what is wrong with them
    stages.py         what holds in each stage of it; context_schedule.py: contexts that grow in stages
    recipe.py         what a config cannot say: functions of a Python file
    init.py           a Hugging Face checkpoint to start from
    model.py          the model of a config, a checkpoint or a recipe, and its loss on one rank's shard
    optimizer.py      AdamW, or a recipe's own, and its learning rate
    loop.py           the training loop, stage after stage
    held_out.py       the loss at all lengths where stages switch
    faults.py         the first module or parameter of a NaN
    dry_run.py        memory and time of each stage, foreseen
    proof.py          ring against one process: loss, every gradient, attention memory
    output.py         the output folder: checked, locked, moved aside
    launch.py         starts the local ranks, or joins a job

    data/             documents -> tokens -> packed sequences -> one rank's shard
    rope/             rotary frequencies of every scaling type, equal to Transformers', and rotations by them
    losses/           a rank's share of the mean loss, whole or in chunks; what the mean is over
    memory/           less of a layer kept for backward: blocks of tokens, activation checkpointing
    parallel/         the ranks as a mesh: who holds the weights, who sums the gradients
    checkpoints/      what a run leaves on disk and goes on from
    reporting/        progress, log, TensorBoard, the page of a run

Each folder's `__init__` says what is in it. Nothing is imported here: each piece brings only what it needs.
"""
