"""Routing policies: pure functions from candidates to a decision."""
