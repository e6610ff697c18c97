"""Where KV blocks are: prompt, tokens, chain, block index, KV events, Mooncake pool."""
