"""Which turns belong together, and where a prompt leaves the one before it."""
