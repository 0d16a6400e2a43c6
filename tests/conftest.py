"""One Hypothesis profile for all tests: no deadline, because the machine is shared, and the same examples every run."""

from hypothesis import settings

settings.register_profile("shared-machine", deadline=None, max_examples=60, derandomize=True, database=None)
settings.load_profile("shared-machine")
