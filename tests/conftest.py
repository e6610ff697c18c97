"""For all tests: properties are about what is true, not how fast on a busy machine."""

from hypothesis import settings

settings.register_profile("moongate", deadline=None)
settings.load_profile("moongate")
