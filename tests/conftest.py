"""Settings of all tests."""

from hypothesis import settings

# A busy machine is slow now and then; that is no failure.
settings.register_profile("meshinfer", deadline=None)
settings.load_profile("meshinfer")
