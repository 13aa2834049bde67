"""The cells of the KV cache that each slot uses: blocks, the prefix tree, copies and shifts."""
