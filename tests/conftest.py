"""How Hypothesis runs: the same examples every time, so that a verdict never depends on luck, and without a deadline,
because a busy machine is no fault. `pytest --hypothesis-profile=explore` draws new examples, and many more of them.
"""

from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("explore", deadline=None, max_examples=2000, print_blob=True)
settings.load_profile("ci")
