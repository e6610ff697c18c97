"""How far what is known of caches is to be believed, and how it outlives a restart."""
