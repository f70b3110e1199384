"""What a run shows and writes beside its checkpoints.

    report.py    progress bar, log, TensorBoard, loss curve
    log.py       one line a step, which a full disk only delays
    meter.py     what a step took: time, MFU, how long ranks waited
    run_page.py  a run's folder as a page of curves, stage by stage

Nothing is imported here.
"""
