// Read pieces of a block of keys in consecutive cells, for lib/unit_pieces.glsl. The constant KEEPS says
// whether addresses of pieces stay in registers.

uint k_own[K_ROUNDS], v_own[V_ROUNDS]; // addresses of pieces within a block

uint k_place(uint j) {
    const uint key = min(k_key(j), CELL_BLOCK - 1); // surplus invocations repeat the last key
    return key * k_stride + place(own_head * K_PIECES + k_column(j), K_CODES);
}

uint v_place(uint j) {
    const uint key = 4 * (gl_LocalInvocationID.x % V_KEYS);
    return key * v_stride + place(own_head * V_PIECES + min(v_column(j), V_PIECES - 1), V_CODES);
}

void find_places(uint kv_head) {
    own_head = kv_head;
    k_stride = place(n_kv * K_PIECES, K_CODES);
    v_stride = place(n_kv * V_PIECES, V_CODES);
    [[unroll]] for (uint j = 0; KEEPS && j < K_ROUNDS; ++j) k_own[j] = k_place(j);
    [[unroll]] for (uint j = 0; KEEPS && j < V_ROUNDS; ++j) v_own[j] = v_place(j);
}

void hold_k_round(uint cell, uint j) {
    k_held[j] = k_piece(cell * k_stride + (KEEPS ? k_own[j] : k_place(j)), k_column(j));
}

// K of invalid keys is loaded, too, and their scores are masked later.
void hold_k(uint cell) {
    [[unroll]] for (uint j = 0; j < K_ROUNDS; ++j) hold_k_round(cell, j);
}

void hold_v(uint cell) {
    [[unroll]] for (uint j = 0; j < V_ROUNDS; ++j) {
        const uint own = KEEPS ? v_own[j] : v_place(j);
        [[unroll]] for (uint u = 0; u < 4; ++u) {
            v_held[4 * j + u] = v_piece((cell + u) * v_stride + own, min(v_column(j), V_PIECES - 1));
        }
    }
}
