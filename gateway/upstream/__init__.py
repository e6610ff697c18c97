"""The HTTP client to workers: connections, and which header lines cross."""
