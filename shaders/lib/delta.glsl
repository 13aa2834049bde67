// Heads of a gated delta net.

// Return the key head of value head h. If `tiled` is set, value heads h, h + n_k, ... share a key head,
// otherwise neighbouring heads.
uint key_head(uint h) { return tiled != 0 ? h % n_k : h / (n_heads / n_k); }

// A row of g has one value per head, or per key channel if KDA is set.
uint gate_at(uint row, uint h) { return g_off + (row * n_heads + h) * (KDA != 0 ? S : 1); }
