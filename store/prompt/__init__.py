"""From a request body to the token ids and block hashes that the engine will see."""
