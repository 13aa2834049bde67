// Heads of a gated delta net. Push constants: n_heads, n_k, tiled, q_stride, v_stride.

// The key head of value head h: neighbouring heads share one, or with `tiled` every n_k-th head.
uint key_head(uint h) { return tiled != 0 ? h % n_k : h / (n_heads / n_k); }

// Start of a row of g: one value per head, or per key channel (KDA).
uint gate_at(uint row, uint h) { return g_off + (row * n_heads + h) * (KDA != 0 ? S : 1); }
