"""Routing policies: pure functions from candidates to a decision; and the ledger of what was decided."""
