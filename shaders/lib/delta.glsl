// Heads of a gated delta net. The including file declares the push constants n_heads, n_k, tiled and g_off.

// Return the key head of value head h. Neighbouring value heads share a key head. With `tiled`, every n_k-th
// value head shares a key head.
uint key_head(uint h) { return tiled != 0 ? h % n_k : h / (n_heads / n_k); }

// A row of g has one value per head, or with KDA one value per key channel.
uint gate_at(uint row, uint h) { return g_off + (row * n_heads + h) * (KDA != 0 ? S : 1); }
