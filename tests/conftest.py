"""What all tests share."""

from hypothesis import settings

# A busy machine must not turn a slow example into a failure: pytest's own time limit bounds a test.
settings.register_profile("weightsync", deadline=None)
settings.load_profile("weightsync")
