"""The command `moongate`."""
