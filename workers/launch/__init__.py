"""Launchers for vLLM workers, simulated workers and the Mooncake master on this machine."""
