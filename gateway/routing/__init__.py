"""From a prompt to a decision: what is known, who may take it, what was chosen and what it taught."""
