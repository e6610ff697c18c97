"""The admin API under /admin/v1."""
