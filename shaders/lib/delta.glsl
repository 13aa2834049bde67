// The heads of a gated delta net. The including file has push constants n_heads, n_k, tiled and q_stride, v_stride.

// The key head of value head h: heads in a row share one, or with `tiled` those n_k apart.
uint key_head(uint h) { return tiled != 0 ? h % n_k : h / (n_heads / n_k); }

// Where rows of g begin: one value per head, or one per key channel (KDA).
uint gate_at(uint row, uint h) { return g_off + (row * n_heads + h) * (KDA != 0 ? S : 1); }
