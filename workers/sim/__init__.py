"""The simulated engine: a pure model (time passed in) and the live server around it."""
