"""Traces, profiles and the discrete-event driver: policies, index and engine model in virtual time."""
