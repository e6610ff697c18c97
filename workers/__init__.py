"""The fleet: registry, leases, health, load."""
