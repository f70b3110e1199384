"""The planner: will it fit, will it hide, how fast, which way. NumPy and pydantic only; `ringspun plan` is its command.

hardware, models    what there is, as data           memory               what fits, item by item
flops, rates        what computing costs             overlap              from which slice on a hop hides
ring, simulate      what a ring takes, by schedule   time, traffic        what a whole step takes and sends
search, explain     the best split, and why          adaptive             ranks of unequal speed
machine             this machine's peaks             export               answers as data
inference           prefill and decode               literature, accuracy how far all of it is to be trusted
"""
