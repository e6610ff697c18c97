"""For all tests: properties are about what is true, not how fast on a busy machine."""

from importlib.util import find_spec

from hypothesis import settings

settings.register_profile("moongate", deadline=None)
settings.load_profile("moongate")

# Needs the libraries of .venv-clients: `make clients`.
collect_ignore = [] if find_spec("langchain_openai") else ["clients"]
