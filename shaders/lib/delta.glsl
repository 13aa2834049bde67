// Heads of a gated delta net.

// Return the key head of value head h. Neighbouring value heads share a key head, or with `tiled` every
// n_k-th value head.
uint key_head(uint h) { return tiled != 0 ? h % n_k : h / (n_heads / n_k); }

// A row of g has one value per head, or with KDA per key channel.
uint gate_at(uint row, uint h) { return g_off + (row * n_heads + h) * (KDA != 0 ? S : 1); }
