"""Traces: what sessions ask, in tokens and block keys. One file for each format."""
