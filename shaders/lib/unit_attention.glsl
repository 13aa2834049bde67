// Compute attention for a tile of rows on matrix units. The operands are F16 and the sums are F32. A tile has
// ROW_GROUPS groups of M rows. V_PARTS subgroups share a group of rows. Each subgroup computes the scores of
// some keys, and p * v for some dimensions. The output stays in matrices, and is rescaled by a matrix of the
// rows' factors. The including file fills q_tile once and kv_tile per block, adds a barrier between steps,
// and defines put and bias_of. Large heads exceed shared memory, so kv_tile may hold one of K_CHUNKS equal
// parts of K, or one of V_CHUNKS of V. DIM_PARTS subgroups may add the scores of the same keys, each over some dimensions.
void put(uint row, uint d, float value); // Stores dimension d of an output row.
float bias_of(uint key_pos); // Returns the bias to add to a key's score.

const uint TQ = M * ROW_GROUPS;
const uint K_QUADS = HEAD_K / 4;
const uint V_QUADS = HEAD_V / 4;
const uint PARTS = V_PARTS * (LANES / M); // invocations per row
const uint KEY_PARTS = V_PARTS / DIM_PARTS;
const uint FK = CELL_BLOCK / N / KEY_PARTS; // matrices of scores per subgroup
const uint FV = HEAD_V / V_CHUNKS / N / V_PARTS; // matrices of output per subgroup and chunk
const uint CHUNK_QUADS = K_QUADS / K_CHUNKS;
const uint PART_QUADS = CHUNK_QUADS / DIM_PARTS;
const uint EACH = CELL_BLOCK / PARTS; // Keys per invocation.
// Strides of rows, in QUADs, are odd multiples of 16 bytes, so that eight rows begin at different banks.
const uint Q_STRIDE = K_QUADS + 2;
const uint K_STRIDE = CHUNK_QUADS + 2;
const uint P_STRIDE = CELL_BLOCK / 4 + 2;
const uint K_SIZE = CELL_BLOCK * K_STRIDE;
const uint V_SIZE = HEAD_V / V_CHUNKS * P_STRIDE;
const uint S_STRIDE = CELL_BLOCK + 4; // floats
const uint S_SCORES = DIM_PARTS * S_STRIDE; // floats per row of the tile
const uint S_ROW = S_SCORES > V_PARTS * N ? S_SCORES : V_PARTS * N;

shared QUAD q_tile[TQ * Q_STRIDE]; // [row][dimension]
shared QUAD kv_tile[K_SIZE > V_SIZE ? K_SIZE : V_SIZE]; // K as [key][dimension], later V as [dimension][key]
shared QUAD p_tile[TQ * P_STRIDE]; // [row][key]
shared float s_tile[TQ * S_ROW]; // scores [part][row][key], later each subgroup's factors or results [row][N]
shared float part_of[LOCAL];

QUAD half_quad(vec4 value) { return quad_of(clamp(value, -65504.0, 65504.0)); }

QUAD k_halves(uint i) {
    if (K_TYPE != CACHE_F16) return half_quad(k_quad(i));
    return quad_of(uvec2(k[k_off + 2 * i], k[k_off + 2 * i + 1]));
}

QUAD v_halves(uint i) {
    if (V_TYPE != CACHE_F16) return half_quad(v_quad(i));
    return quad_of(uvec2(v[v_off + 2 * i], v[v_off + 2 * i + 1]));
}

uint v_part() { return gl_SubgroupID % V_PARTS; }

uint own() { return gl_SubgroupID / V_PARTS * M; } // the subgroup's first row of the tile

uint lane_part() { return gl_SubgroupInvocationID / M; }

uint key_part() { return v_part() * (LANES / M) + lane_part(); }

uint row_of_tile() { return own() + gl_SubgroupInvocationID % M; }

uint staged() { return own() * S_ROW + v_part() * M * N; }

// Return the index in part_of of the row's first value. The row's PARTS values are M apart.
uint parts() { return gl_SubgroupID / V_PARTS * PARTS * M + gl_SubgroupInvocationID % M; }

float m = NEG_LARGE;
float l = 0.0; // sum of p over the invocation's keys
MATRIX_SUM sum[V_CHUNKS * FV];
MATRIX_SUM score[FK];

void clear_sums() {
    [[unroll]] for (uint g = 0; g < V_CHUNKS * FV; ++g) sum[g] = MATRIX_SUM(0.0);
}

void score_keys(uint chunk) {
    if (chunk == 0) {
        [[unroll]] for (uint g = 0; g < FK; ++g) score[g] = MATRIX_SUM(0.0);
    }
    const uint dim_part = DIM_PARTS == 1 ? 0 : v_part() / KEY_PARTS;
    const uint key_part = DIM_PARTS == 1 ? v_part() : v_part() % KEY_PARTS;
    const uint own_q = own() * Q_STRIDE + chunk * CHUNK_QUADS + dim_part * PART_QUADS;
    const uint own_k = key_part * FK * N * K_STRIDE + dim_part * PART_QUADS;
    // The loops here and in add_values have variable bounds, because drivers would take minutes to unroll
    // constant loops.
    for (uint first = own_q; first < own_q + PART_QUADS; first += SCORE_UNROLL * K / 4) {
        [[unroll]] for (uint u = 0; u < SCORE_UNROLL; ++u) {
            const uint at = first + u * K / 4;
            MATRIX_A rows;
            LOAD_ROWS(rows, q_tile, at, Q_STRIDE);
            [[unroll]] for (uint g = 0; g < FK; ++g) {
                MATRIX_B columns;
                LOAD_COLUMNS(columns, kv_tile, own_k + g * N * K_STRIDE + at - own_q, K_STRIDE);
                score[g] = MULTIPLY_ADD(rows, columns, score[g]);
            }
        }
    }
    if (chunk + 1 < K_CHUNKS) return;
    const uint own_s = own() * S_ROW + dim_part * M * S_STRIDE + key_part * FK * N;
    [[unroll]] for (uint g = 0; g < FK; ++g) STORE_ROWS(score[g], s_tile, own_s + g * N, S_STRIDE);
}

// Whether a row does not attend to key i of the invocation's EACH keys. An including file may define it.
#ifndef MASKED
#define MASKED(i, key_pos, begin, end) (key_pos > end || key_pos < begin)
#endif

// Convert scores to probabilities for keys at positions begin..end. The function has one barrier.
void weigh_keys(uint block_pos, uint begin, uint end) {
    const uint own_s = own() * S_ROW + gl_SubgroupInvocationID % M * S_STRIDE + key_part() * EACH;
    float s[EACH];
    float top = NEG_LARGE;
    [[unroll]] for (uint i = 0; i < EACH; ++i) {
        // The first unmasked key clears the sums over masked keys, as in attn_prefill.comp.
        const uint key_pos = block_pos + key_part() * EACH + i;
        const bool masked = MASKED(i, key_pos, begin, end);
        float sum_of_parts = s_tile[own_s + i];
        [[unroll]] for (uint part = 1; part < DIM_PARTS; ++part) sum_of_parts += s_tile[own_s + part * M * S_STRIDE + i];
        s[i] = sum_of_parts * scale;
        if (HAS_SOFTCAP != 0) s[i] = soft_cap(s[i], softcap);
        s[i] += bias_of(key_pos);
        s[i] = masked ? NEG_LARGE : s[i];
        top = max(top, s[i]);
    }
    part_of[parts() + key_part() * M] = top;
    barrier();

    float m_new = m;
    [[unroll]] for (uint i = 0; i < PARTS; ++i) m_new = max(m_new, part_of[parts() + i * M]);
    const float rescale = exp(m - m_new);
    m = m_new;
    l *= rescale;
    [[unroll]] for (uint i = 0; i < EACH; i += 4) {
        const vec4 p = exp(vec4(s[i], s[i + 1], s[i + 2], s[i + 3]) - m_new);
        l += (p.x + p.y) + (p.z + p.w);
        p_tile[row_of_tile() * P_STRIDE + (key_part() * EACH + i) / 4] = quad_of(p);
    }
    const uint factors = staged() + gl_SubgroupInvocationID % M * N + lane_part();
    [[unroll]] for (uint c = 0; c < N; c += LANES / M) s_tile[factors + c] = rescale;
}

void add_round(uint at, uint chunk) {
    [[unroll]] for (uint u = 0; u < UNROLL; ++u) {
        MATRIX_A rows;
        LOAD_ROWS(rows, p_tile, at + u * K / 4, P_STRIDE);
        const uint key = at + u * K / 4 - own() * P_STRIDE;
        [[unroll]] for (uint g = 0; g < FV; ++g) {
            MATRIX_B columns;
            LOAD_COLUMNS(columns, kv_tile, (v_part() * FV + g) * N * P_STRIDE + key, P_STRIDE);
            sum[chunk * FV + g] = MULTIPLY_ADD(rows, columns, sum[chunk * FV + g]);
        }
    }
}

void add_values(uint chunk) {
    MATRIX_SUM factors;
    LOAD_ROWS(factors, s_tile, staged(), N);
    [[unroll]] for (uint g = 0; g < FV; ++g) SCALE_BY(sum[chunk * FV + g], factors);
    const uint first = own() * P_STRIDE;
    if (UNROLL * K == CELL_BLOCK) { // in a loop of one iteration, drivers copy all sums
        add_round(first, chunk);
    } else {
        for (uint at = first; at < first + CELL_BLOCK / 4; at += UNROLL * K / 4) add_round(at, chunk);
    }
}

// Add l of all invocations of the row.
void join_sums() {
    barrier();
    part_of[parts() + key_part() * M] = l;
    barrier();
    l = 0.0;
    [[unroll]] for (uint i = 0; i < PARTS; ++i) l += part_of[parts() + i * M];
}

void put_results(float factor) {
    [[unroll]] for (uint g = 0; g < V_CHUNKS * FV; ++g) {
        STORE_ROWS(sum[g], s_tile, staged(), N);
        barrier();
        const uint from = staged() + gl_SubgroupInvocationID % M * N + lane_part();
        // The loop count is constant, because ANV would otherwise store all sums in memory.
        [[unroll]] for (uint c = 0; c < N; c += LANES / M) {
            const uint matrix = g / FV * V_PARTS * FV + v_part() * FV + g % FV;
            put(row_of_tile(), matrix * N + c + lane_part(), s_tile[from + c] * factor);
        }
        barrier();
    }
}
