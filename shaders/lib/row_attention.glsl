// Compute the attention of a tile's rows over one split of their keys, for up to HEADS q heads of one kv
// head. A query is one head of one row. Online softmax reads blocks of 32 keys. If FINAL is set, there is one
// split, and the shader writes the result. Otherwise the shader writes part = (sum of p * v, maximum score,
// sum of p). A row without keys gets zeros. The including file defines these functions.
uint n_keys_of(uint row, uint pos);
uint first_key_of(uint n_keys);
bool in_window(uint key_pos, uint n_keys);
bool begin_together(uint first_key, uint other_first_key);
void open_block(uint slot, uint block, uint n_keys); // Sets the block of cell_of(j).
uint cell_of(uint j);
float changed(float score, uint a, uint key); // Returns query a's score after its soft cap and bias.
float inverse_sum(float m, float sum, uint head); // the factor that normalises a FINAL result
#include "lib/row_tile.glsl"
#include "lib/v_quads.glsl"

const uint QUERIES = HEADS * ROWS;
const uint LANES = LOCAL > CELL_BLOCK ? LOCAL / CELL_BLOCK : 1; // threads per key
const uint KEYS = LOCAL < CELL_BLOCK ? CELL_BLOCK / LOCAL : 1; // keys per thread
const uint K_QUADS = HEAD_K / 4;
// Thread groups multiply V of different keys.
const uint V_GROUPS = LOCAL > V_QUADS ? LOCAL / V_QUADS : 1;
// A thread loads K_BATCH quads of K, or V of V_BATCH keys, before it uses the first. K_BATCH is the smallest
// number with which the loop has only K_TURNS iterations. There is no branch between a load and its use,
// because RADV would then delay the load until its use.
const uint K_TURNS = (K_QUADS + BATCH * LANES - 1) / (BATCH * LANES);
const uint K_BATCH = (K_QUADS + K_TURNS * LANES - 1) / (K_TURNS * LANES);
const uint K_ROUND = K_BATCH * LANES; // quads of a key
const bool K_EXACT = K_QUADS % K_ROUND == 0;
// K_WORDS is like V_WORDS in v_quads.glsl.
const bool K_QUANTIZED = K_TYPE >= CACHE_Q8_0;
const bool K_WHOLE_PAIRS = K_QUADS % 16 == 0;
const bool K_ROUND_OF_PAIRS = K_ROUND % 16 == 0;
const bool K_LANES_IN_PAIR = LANES < 16;
const bool K_WORDS = K_QUANTIZED && K_EXACT && K_WHOLE_PAIRS && K_ROUND_OF_PAIRS && K_LANES_IN_PAIR;
const uint V_EACH = (CELL_BLOCK + V_GROUPS - 1) / V_GROUPS;
const uint V_MOST = BATCH > V_ROUNDS ? BATCH / V_ROUNDS : 1;
const uint V_BATCH = V_EACH < V_MOST ? V_EACH : V_MOST;
const uint V_STEP = V_BATCH * V_GROUPS; // keys of V per iteration of a workgroup
const bool V_EXACT = CELL_BLOCK % V_STEP == 0; // no thread reads beyond a block
const uint SCORES = QUERIES * CELL_BLOCK;

shared vec4 q_tile[QUERIES * K_QUADS];
shared float dots[QUERIES * LOCAL]; // a thread's partial score, or the maximum score of its keys
shared float score[SCORES];
shared float prob[SCORES];
shared float query_max[2 * QUERIES]; // maxima before and after a block
shared float query_rescale[QUERIES];
shared vec4 group_acc[LOCAL];
shared float group_l[LOCAL];

// These are not local variables, because drivers would compute those again in each iteration over blocks.
uint thread = gl_LocalInvocationID.x;
uint lane = thread % LANES; // the thread's index among the threads of its key
uint first_own_key = thread / LANES;
uint v_group = min(thread / V_QUADS, V_GROUPS - 1); // nothing reads the results of surplus threads
uint now = 0; // the half of query_max that is in use, 0 or 1
float s[QUERIES]; // scores of one key, or partial scores
float l[QUERIES]; // sums of p
vec4 acc[QUERIES * V_ROUNDS]; // sums of p * v

void clear_sums() {
    [[unroll]] for (uint a = 0; a < QUERIES; ++a) l[a] = 0.0;
    [[unroll]] for (uint a = 0; a < QUERIES * V_ROUNDS; ++a) acc[a] = vec4(0.0);
}

uint row, n_tile_rows, split, kv_head; // `row` is the tile's first row
int first_head; // The tile's q head number h is head first_head + h of this device.
uint begin_head, end_head; // this device's heads of the tile
uint n_keys, first_key; // of the tile's first row; each further row has one key more
uint block_pos;

bool is_here(uint a) {
    const uint head = head_of(a);
    const bool is_head = head >= begin_head && head < end_head;
    if (ROWS == 1) return is_head;
    return is_head && row_of(a) < n_tile_rows;
}

// Return whether a query attends to a key of the block. At least one row of the tile attends to keys
// first_valid..n_valid.
bool attends(uint a, uint key, uint first_valid, uint n_valid) {
    if (ROWS == 1) return key >= first_valid && key < n_valid;
    const uint n = n_keys + row_of(a);
    return key >= first_valid && block_pos + key < n && in_window(block_pos + key, n);
}

void find_heads() {
    const uint tiles = (group + HEADS - 1) / HEADS;
    kv_head = gl_WorkGroupID.y / tiles;
    const uint first_in_group = gl_WorkGroupID.y % tiles * HEADS;
    first_head = int(kv_head * group + first_in_group) - int(q_first);
    begin_head = uint(max(-first_head, 0));
    end_head = uint(clamp(int(n_heads) - first_head, 0, int(min(HEADS, group - first_in_group))));
}

void read_queries() {
    for (uint e = thread; e < QUERIES * K_QUADS; e += LOCAL) {
        const uint a = e / K_QUADS;
        vec4 value = vec4(0.0);
        if (is_here(a)) {
            const uint index = (row + row_of(a)) * n_heads + uint(first_head + int(head_of(a)));
            const uint at = q_off + index * HEAD_K + 4 * (e % K_QUADS);
            value = vec4(q[at], q[at + 1], q[at + 2], q[at + 3]) * scale;
        }
        q_tile[e] = value;
    }
    for (uint a = thread; a < QUERIES; a += LOCAL) query_max[a] = NEG_LARGE;
    barrier();
}

// Add the thread's part of q * k to s. The key's quads begin at `base`.
void multiply_key(uint base) {
    // The bounds are variable, because drivers would take seconds to unroll a constant loop.
    for (uint first = base; first < base + K_QUADS; first += K_ROUND) {
        vec4 value[K_BATCH];
        [[unroll]] for (uint i = 0; i < K_BATCH; ++i) {
            if (K_WORDS) {
                const uint skipped = i * LANES / 8 * halves_of(K_TYPE);
                value[i] = k_block_quad(k_off + first / 16 * halves_of(K_TYPE), skipped, lane + i * LANES % 8);
            } else {
                const uint at = first + lane + i * LANES;
                value[i] = k_quad(K_EXACT ? at : min(at, base + K_QUADS - 1));
            }
        }
        [[unroll]] for (uint i = 0; i < K_BATCH; ++i) {
            const uint quad = first + lane + i * LANES - base;
            const bool inside = K_EXACT || quad < K_QUADS;
            [[unroll]] for (uint a = 0; a < QUERIES; ++a) {
                s[a] += inside ? dot(value[i], q_tile[a * K_QUADS + min(quad, K_QUADS - 1)]) : 0.0;
            }
        }
    }
}

void score_block(uint first_valid, uint n_valid) {
    float top[QUERIES];
    [[unroll]] for (uint a = 0; a < QUERIES; ++a) top[a] = NEG_LARGE;
    for (uint key = first_own_key; key < CELL_BLOCK; key += LOCAL) {
        const bool valid = key >= first_valid && key < n_valid;
        [[unroll]] for (uint a = 0; a < QUERIES; ++a) s[a] = 0.0;
        // All cells of a block exist, so reading invalid keys is safe.
        if (BATCH > 1 || valid) multiply_key((cell_of(key) * n_kv + kv_head) * K_QUADS);
        [[unroll]] for (uint a = 0; a < QUERIES; ++a) {
            if (LANES > 1) {
                dots[a * LOCAL + thread] = s[a];
            } else {
                s[a] = attends(a, key, first_valid, n_valid) ? changed(s[a], a, key) : NEG_LARGE;
                score[a * CELL_BLOCK + key] = s[a];
                top[a] = max(top[a], s[a]);
            }
        }
    }
    if (LANES > 1) {
        barrier();
        for (uint e = thread; e < SCORES; e += LOCAL) {
            const uint j = e % CELL_BLOCK;
            float sum = 0.0;
            [[unroll]] for (uint i = 0; i < LANES; ++i) sum += dots[e / CELL_BLOCK * LOCAL + j * LANES + i];
            score[e] = attends(e / CELL_BLOCK, j, first_valid, n_valid) ? changed(sum, e / CELL_BLOCK, j) : NEG_LARGE;
        }
    } else {
        [[unroll]] for (uint a = 0; a < QUERIES; ++a) dots[a * LOCAL + thread] = top[a];
    }
    barrier();
}

void soften_block(uint n_valid) {
    for (uint e = thread; e < SCORES; e += LOCAL) {
        const uint a = e / CELL_BLOCK;
        const float m = query_max[now * QUERIES + a];
        float m_new = m;
        if (KEYS > 1) {
            for (uint i = a * LOCAL; i < (a + 1) * LOCAL; ++i) m_new = max(m_new, dots[i]);
        } else {
            for (uint first = 0; first < n_valid; first += 4 * BATCH) {
                [[unroll]] for (uint j = 0; j < 4 * BATCH; ++j) m_new = max(m_new, score[a * CELL_BLOCK + first + j]);
            }
        }
        prob[e] = exp(score[e] - m_new);
        if (e % CELL_BLOCK == 0) {
            query_max[(1 - now) * QUERIES + a] = m_new;
            query_rescale[a] = exp(m - m_new);
        }
    }
    now = 1 - now;
    barrier();
}

void add_values(uint first_valid, uint n_valid) {
    [[unroll]] for (uint a = 0; a < QUERIES; ++a) {
        const float rescale = query_rescale[a];
        l[a] *= rescale;
        [[unroll]] for (uint i = 0; i < V_ROUNDS; ++i) acc[a * V_ROUNDS + i] *= rescale;
    }
    for (uint first = V_STEP > 1 ? 0 : first_valid; first < n_valid; first += V_STEP) {
        vec4 value[V_BATCH * V_ROUNDS]; // the nearest valid key replaces a masked key
        [[unroll]] for (uint u = 0; u < V_BATCH; ++u) {
            const uint j = clamp(first + v_group + u * V_GROUPS, first_valid, n_valid - 1);
            const uint base = (cell_of(j) * n_kv + kv_head) * V_QUADS;
            [[unroll]] for (uint i = 0; i < V_ROUNDS; ++i) value[u * V_ROUNDS + i] = v_quad_of(base, i);
        }
        [[unroll]] for (uint u = 0; u < V_BATCH; ++u) {
            const uint j = first + v_group + u * V_GROUPS;
            [[unroll]] for (uint a = 0; a < QUERIES; ++a) {
                // 0 for masked keys
                const float weight = prob[a * CELL_BLOCK + min(j, CELL_BLOCK - 1)];
                const float p = V_EXACT || j < CELL_BLOCK ? weight : 0.0;
                l[a] += p;
                [[unroll]] for (uint i = 0; i < V_ROUNDS; ++i) acc[a * V_ROUNDS + i] += p * value[u * V_ROUNDS + i];
            }
        }
    }
}

// Add acc[a] and p of all groups of threads. Return the sum of p. V_ROUNDS must be 1.
float join_groups(uint a) {
    float sum = l[a];
    barrier();
    group_acc[thread] = acc[a];
    group_l[thread] = sum;
    barrier();
    if (thread < V_QUADS) {
        // The bounds depend on the thread, because compilers would unroll a constant loop once per head.
        for (uint at = V_QUADS + thread; at < V_GROUPS * V_QUADS; at += V_QUADS) {
            acc[a] += group_acc[at];
            sum += group_l[at];
        }
    }
    return sum;
}

void put_result(uint a, float sum) {
    const uint head = uint(first_head + int(head_of(a)));
    const uint index = (row + row_of(a)) * n_heads + head;
    const float m = query_max[now * QUERIES + a];
    uint base = part_off + (index * n_splits + split) * (HEAD_V + 2);
    float factor = 1.0;
    if (FINAL != 0) {
        base = part_off + index * HEAD_V;
        factor = sum > 0.0 ? inverse_sum(m, sum, head) : 0.0;
    } else if (thread == 0) {
        part[base + HEAD_V] = m;
        part[base + HEAD_V + 1] = sum;
    }
    [[unroll]] for (uint i = 0; i < V_ROUNDS; ++i) {
        const uint quad = thread + i * LOCAL;
        const vec4 result = acc[a * V_ROUNDS + i] * factor;
        if (quad < V_QUADS) {
            [[unroll]] for (uint c = 0; c < 4; ++c) part[base + 4 * quad + c] = result[c];
        }
    }
}

void main() {
    // Consecutive workgroups have consecutive rows, so reads of the same keys are close in time.
    row = gl_WorkGroupID.x;
    n_tile_rows = rows_from(row);
    if (n_tile_rows == 0) return;
    split = gl_WorkGroupID.z;
    find_heads();
    const uvec2 place = step_place(row);
    const uint slot = place.y;
    n_keys = n_keys_of(row, place.x);
    first_key = first_key_of(n_keys);
    const uint n_blocks = (n_keys + CELL_BLOCK - 1) / CELL_BLOCK;
    const uint per_split = (n_blocks - first_key / CELL_BLOCK + n_splits - 1) / n_splits;
    const uint first_block = first_key / CELL_BLOCK + split * per_split;
    const uint end_block = min(first_block + per_split, n_blocks);

    read_queries();
    clear_sums();
    for (uint block = first_block; block < end_block; ++block) {
        block_pos = block * CELL_BLOCK;
        const uint n_valid = min(n_keys + n_tile_rows - 1 - block_pos, CELL_BLOCK);
        const uint first_valid = max(first_key, block_pos) - block_pos;
        open_block(slot, block, n_keys);
        score_block(first_valid, n_valid);
        soften_block(n_valid);
        add_values(first_valid, n_valid);
    }
    [[unroll]] for (uint a = 0; a < QUERIES; ++a) {
        float sum = l[a];
        if (V_GROUPS > 1) sum = join_groups(a);
        if (is_here(a) && thread < V_QUADS) put_result(a, sum);
    }
}
