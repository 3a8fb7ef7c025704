"""Settings of all tests: hypothesis draws the same examples each time, and no test asserts a time."""

from hypothesis import settings

settings.register_profile("same", deadline=None, derandomize=True)
settings.load_profile("same")
