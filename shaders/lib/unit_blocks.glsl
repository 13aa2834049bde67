// Read pieces of a block of keys in consecutive cells, for lib/unit_pieces.glsl. The constant KEEPS says
// whether addresses of pieces stay in registers.

const bool KEEPS_K = KEEPS && K_CHUNKS == 1;
const bool KEEPS_V = KEEPS && V_CHUNKS == 1;

uint k_own[K_ROUNDS], v_own[V_ROUNDS]; // addresses of pieces within a block

uint k_piece_of(uint j, uint chunk) { return chunk * K_COLUMNS + k_column(j); }

uint v_piece_of(uint j, uint chunk) { return chunk * V_COLUMNS + min(v_column(j), V_COLUMNS - 1); }

uint k_place(uint j, uint chunk) {
    const uint key = min(k_key(j), CELL_BLOCK - 1); // surplus invocations repeat the last key
    return key * k_stride + place(own_head * K_PIECES + k_piece_of(j, chunk), K_CODES);
}

uint v_place(uint j, uint chunk) {
    const uint key = 4 * (gl_LocalInvocationID.x % V_KEYS);
    return key * v_stride + place(own_head * V_PIECES + v_piece_of(j, chunk), V_CODES);
}

void find_places(uint kv_head) {
    own_head = kv_head;
    k_stride = place(n_kv * K_PIECES, K_CODES);
    v_stride = place(n_kv * V_PIECES, V_CODES);
    [[unroll]] for (uint j = 0; KEEPS_K && j < K_ROUNDS; ++j) k_own[j] = k_place(j, 0);
    [[unroll]] for (uint j = 0; KEEPS_V && j < V_ROUNDS; ++j) v_own[j] = v_place(j, 0);
}

void hold_k_round(uint cell, uint j, uint chunk) {
    k_held[j] = k_piece(cell * k_stride + (KEEPS_K ? k_own[j] : k_place(j, chunk)), k_piece_of(j, chunk));
}

// K of invalid keys is loaded, too, and their scores are masked later.
void hold_k(uint cell, uint chunk) {
    [[unroll]] for (uint j = 0; j < K_ROUNDS; ++j) hold_k_round(cell, j, chunk);
}

void hold_v(uint cell, uint chunk) {
    [[unroll]] for (uint j = 0; j < V_ROUNDS; ++j) {
        const uint own = KEEPS_V ? v_own[j] : v_place(j, chunk);
        [[unroll]] for (uint u = 0; u < 4; ++u) {
            v_held[4 * j + u] = v_piece((cell + u) * v_stride + own, v_piece_of(j, chunk));
        }
    }
}
