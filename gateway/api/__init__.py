"""What a request's body says that routing needs, and the few bytes of it that may change."""
