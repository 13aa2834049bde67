// Tiles of TQ rows of one run, for attn_prefill. Include after lib/step.glsl.

struct QueryTile {
    uint slot;
    uint first_row;
    uint first_pos;
    uint n; // If there is no such tile, n is 0, and rows from first_row on have no run.
};

QueryTile find_query_tile(uint number) {
    uint tile = number;
    for (uint r = step_n_decode(); r < step_n_runs(); ++r) { // attn_decode processes the earlier runs
        const uvec4 run = step_params.runs[r];
        const uint n_tiles = (run.z + TQ - 1) / TQ;
        if (tile < n_tiles) return QueryTile(run.x, run.y + tile * TQ, run.w + tile * TQ, min(run.z - tile * TQ, TQ));
        tile -= n_tiles;
    }
    return QueryTile(0, step_n_rows() + tile * TQ, 0, 0);
}

uint first_key_of(uint pos) {
    const uint first = window > 0 && pos + 1 > window ? pos + 1 - window : 0;
    return chunk > 0 ? max(first, pos / chunk * chunk) : first;
}

void zero_rows(uint first, uint head) {
    const uint end = min(first + TQ, n_rows);
    for (uint row = first; row < end; ++row) {
        for (uint d = gl_LocalInvocationID.x; d < HEAD_V; d += LOCAL) {
            y[y_off + (row * n_heads + head) * HEAD_V + d] = 0.0;
        }
    }
}
