"""The planner: will it fit, will it hide, how fast, which way. NumPy and pydantic only; `ringspun plan` is its command.

hardware, models    what there is, as data          memory     what fits, item by item
flops, rates        what computing costs            overlap    from which slice on a hop hides
inference           prefill, decode                 literature, accuracy    how far all of it is to be trusted
"""
