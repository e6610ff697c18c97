"""The HTTP surface: what clients and operators talk to."""
