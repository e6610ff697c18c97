"""A turn's way to a worker and its answer's way back, byte for byte."""
