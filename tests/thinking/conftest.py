"""Property tests here are small; a busy machine must not fail them by the clock, nor a random seed by luck."""

from hypothesis import settings

settings.register_profile("steady", deadline=None, derandomize=True)
settings.load_profile("steady")
