// Tiles of TQ rows from one run, for attn_prefill. Include after lib/step.glsl.

// Values of `causal`, which decides to which later rows a row attends: all rows of its text (0), none (1),
// rows of runs that state an end (2), or all rows of the step, where row p has position p (3).
const uint BOTH_WAYS = 0;
const uint CAUSAL = 1;
const uint SEES_END = 2;
const uint SEES_ALL = 3;

struct QueryTile {
    uint slot;
    uint first_row;
    uint first_pos;
    uint n; // 0 after the last tile: rows from first_row on belong to no run.
    uint begin, end; // the positions that the run's rows attend to: unused if CAUSAL, only `end` if SEES_END
};

QueryTile find_query_tile(uint number) {
    uint tile = number;
    for (uint r = step_n_decode(); r < step_n_runs(); ++r) { // attn_decode processes the earlier runs
        const uvec4 run = step_params.runs[r];
        const uint n_tiles = (run.z + TQ - 1) / TQ;
        if (tile < n_tiles) {
            const uint first = tile * TQ;
            const uvec4 state = step_params.states[r];
            const uint begin = causal == BOTH_WAYS ? state.w : 0;
            return QueryTile(run.x, run.y + first, run.w + first, min(run.z - first, TQ), begin, state.z);
        }
        tile -= n_tiles;
    }
    return QueryTile(0, step_n_rows() + tile * TQ, 0, 0, 0, 0);
}

// Return the first position that a row attends to. If rows attend both ways, a window extends to both sides.
uint first_key_of(uint pos, uint begin) {
    const uint reach = causal != BOTH_WAYS ? window - 1 : window / 2;
    const uint first = max(begin, window > 0 && pos > reach ? pos - reach : 0);
    return chunk > 0 ? max(first, pos / chunk * chunk) : first;
}

// Return the position after the last position that a row attends to. `end` is the end of the row's text or
// picture.
uint end_key_of(uint pos, uint end) {
    if (causal == CAUSAL) return pos + 1;
    if (causal == SEES_END) return max(end, pos + 1);
    if (causal == SEES_ALL) return step_n_rows();
    return window > 0 ? min(end, pos + window / 2 + 1) : end;
}

// Return ALiBi's bias of a score (Press et al. 2022), for keys before or after the row.
float distance_bias(uint row_pos, uint key_pos, uint head) {
    return -slopes[slopes_off + head] * abs(float(row_pos) - float(key_pos));
}

void zero_rows(uint first, uint head) {
    const uint end = min(first + TQ, n_rows);
    for (uint row = first; row < end; ++row) {
        for (uint d = gl_LocalInvocationID.x; d < HEAD_V; d += LOCAL) {
            y[y_off + (row * n_heads + head) * HEAD_V + d] = 0.0;
        }
    }
}
