// Heads of a gated delta net. Push constants: n_heads, n_k, tiled, q_stride, v_stride.

// Neighbouring value heads share a key head, or with `tiled` every n_k-th.
uint key_head(uint h) { return tiled != 0 ? h % n_k : h / (n_heads / n_k); }

// A row of g has a value per head, or per key channel (KDA).
uint gate_at(uint row, uint h) { return g_off + (row * n_heads + h) * (KDA != 0 ? S : 1); }
