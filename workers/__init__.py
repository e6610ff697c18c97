"""The fleet: registry, health, load, discovery."""
