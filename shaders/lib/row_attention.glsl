// The attention of one row over one split of its keys, for up to HEADS q heads of one kv head: what attn_decode and
// attn_chosen share. Workgroup (tile of heads, split, row). It walks over blocks of 32 keys. For the scores, LOCAL / 32
// threads share a key, or with LOCAL < 32 a thread has 32 / LOCAL keys. For the sum of p * v, each thread has four
// dimensions of V at a time. FINAL: there is one split, and the result is written. Otherwise part = (sum of p * v,
// max, sum of p). A row without keys gives zeros. The including file declares the buffers, and says which keys there
// are: N_KEYS(row), FIRST_KEY(n_keys), OPEN_BLOCK(slot, block), which declares what CELL(j) needs, the cell of key j of
// the block; CAPPED(score), and INVERSE_SUM(m, sum, head), by which FINAL results are multiplied.

const uint LANES = LOCAL > CELL_BLOCK ? LOCAL / CELL_BLOCK : 1; // threads per key
const uint KEYS = LOCAL < CELL_BLOCK ? CELL_BLOCK / LOCAL : 1; // keys per thread
const uint K_QUADS = HEAD_K / 4;
const uint V_QUADS = HEAD_V / 4;
const uint V_GROUPS = LOCAL > V_QUADS ? LOCAL / V_QUADS : 1; // sets of threads that share out a block's keys
const uint V_ROUNDS = (V_QUADS + LOCAL - 1) / LOCAL; // quads per thread
// K_BATCH quads of K, and V_BATCH keys of V, are what a thread reads before it uses the first. K_BATCH is at
// most BATCH, and the smallest with which the loop has as few rounds (K_TURNS). No branch may lie between the
// reads and their use: RADV would move each load down to where its value is used.
const uint K_TURNS = (K_QUADS + BATCH * LANES - 1) / (BATCH * LANES);
const uint K_BATCH = (K_QUADS + K_TURNS * LANES - 1) / (K_TURNS * LANES);
const bool K_EXACT = K_QUADS % (K_BATCH * LANES) == 0;
// Two quantized blocks (16 quads) are whole words, one is not. With K_WORDS and V_WORDS a thread's quads lie
// at the same places of such a pair in every round, so the compiler knows where each begins. Each condition
// is a sum of terms that must all be 0, because glslang makes no constant of three conditions joined by &&.
const bool K_WORDS = K_TYPE >= CACHE_Q8_0 && K_QUADS % (K_BATCH * LANES) + K_QUADS % 16 + K_BATCH * LANES % 16 + LANES / 16 == 0;
const bool V_WORDS = V_TYPE >= CACHE_Q8_0 && V_QUADS % 16 + LOCAL % V_QUADS == 0;
const uint V_EACH = (CELL_BLOCK + V_GROUPS - 1) / V_GROUPS;
const uint V_MOST = BATCH > V_ROUNDS ? BATCH / V_ROUNDS : 1;
const uint V_BATCH = V_EACH < V_MOST ? V_EACH : V_MOST;
const uint SCORES = HEADS * CELL_BLOCK;
const bool V_EXACT = CELL_BLOCK % (V_BATCH * V_GROUPS) == 0; // no thread reads beyond a block

shared vec4 q_tile[HEADS * K_QUADS];
shared float dots[HEADS * LOCAL];
shared float score[SCORES];
shared float prob[SCORES];
shared float head_max[2 * HEADS]; // before and after a block, in turn
shared float head_rescale[HEADS];
shared vec4 group_acc[LOCAL];
shared float group_l[LOCAL];

void main() {
    const uint thread = gl_LocalInvocationID.x;
    const uint tiles = (group + HEADS - 1) / HEADS; // of the q heads of a kv head
    const uint kv_head = gl_WorkGroupID.x / tiles;
    const uint first_in_group = gl_WorkGroupID.x % tiles * HEADS;
    const uint split = gl_WorkGroupID.y;
    const uint row = gl_WorkGroupID.z;
    const uint slot = step_params.rows[row].y;
    // Head number of the tile is q head first_head + number; a device may begin and end in the middle of a group.
    const int first_head = int(kv_head * group + first_in_group) - int(q_first);
    const uint begin_head = uint(max(-first_head, 0));
    const uint end_head = uint(clamp(int(n_heads) - first_head, 0, int(min(HEADS, group - first_in_group))));

    const uint n_keys = N_KEYS(row);
    const uint first_key = FIRST_KEY(n_keys);
    const uint n_blocks = (n_keys + CELL_BLOCK - 1) / CELL_BLOCK;
    const uint per_split = (n_blocks - first_key / CELL_BLOCK + n_splits - 1) / n_splits;
    const uint first_block = first_key / CELL_BLOCK + split * per_split;
    const uint end_block = min(first_block + per_split, n_blocks);

    for (uint e = thread; e < HEADS * K_QUADS; e += LOCAL) {
        const uint a = e / K_QUADS;
        vec4 value = vec4(0.0);
        if (a >= begin_head && a < end_head) {
            const uint at = q_off + (row * n_heads + uint(first_head + int(a))) * HEAD_K + 4 * (e % K_QUADS);
            value = vec4(q[at], q[at + 1], q[at + 2], q[at + 3]) * scale;
        }
        q_tile[e] = value;
    }
    for (uint a = thread; a < HEADS; a += LOCAL) head_max[a] = NEG_LARGE;
    barrier();

    const uint key = thread / LANES;
    const uint lane = thread % LANES;
    const uint v_group = min(thread / V_QUADS, V_GROUPS - 1); // surplus threads' results are not read
    const uint v_quad0 = thread % V_QUADS;
    uint now = 0; // which half of head_max holds the maxima so far
    float l[HEADS]; // of the keys this thread multiplied with V
    vec4 acc[HEADS * V_ROUNDS];
    [[unroll]] for (uint a = 0; a < HEADS; ++a) l[a] = 0.0;
    [[unroll]] for (uint a = 0; a < HEADS * V_ROUNDS; ++a) acc[a] = vec4(0.0);

    for (uint block = first_block; block < end_block; ++block) {
        OPEN_BLOCK(slot, block);
        const uint n_valid = min(n_keys - block * CELL_BLOCK, CELL_BLOCK);
        const uint first_valid = max(first_key, block * CELL_BLOCK) - block * CELL_BLOCK;

        float top[HEADS]; // of the keys of this thread
        [[unroll]] for (uint a = 0; a < HEADS; ++a) top[a] = NEG_LARGE;
        for (uint at_key = key; at_key < CELL_BLOCK; at_key += LOCAL) {
            float s[HEADS];
            [[unroll]] for (uint a = 0; a < HEADS; ++a) s[a] = 0.0;
            const bool valid = at_key >= first_valid && at_key < n_valid;
            if (BATCH > 1 || valid) { // cells of keys that are not valid can be read: a block is whole
                const uint base = (CELL(at_key) * n_kv + kv_head) * K_QUADS;
                // The bounds are no constants, or drivers unroll all of it and take seconds to compile.
                for (uint turn = base; turn < base + K_QUADS; turn += K_BATCH * LANES) {
                    vec4 value[K_BATCH];
                    [[unroll]] for (uint i = 0; i < K_BATCH; ++i) {
                        const uint at = turn + lane + i * LANES;
                        if (K_WORDS) {
                            const uint behind = i * LANES / 8 * halves_of(K_TYPE);
                            value[i] = k_block_quad(k_off + turn / 16 * halves_of(K_TYPE), behind, lane + i * LANES % 8);
                        } else {
                            value[i] = k_quad(K_EXACT ? at : min(at, base + K_QUADS - 1));
                        }
                    }
                    [[unroll]] for (uint i = 0; i < K_BATCH; ++i) {
                        const uint quad = turn + lane + i * LANES - base;
                        const bool inside = K_EXACT || quad < K_QUADS;
                        [[unroll]] for (uint a = 0; a < HEADS; ++a) {
                            s[a] += inside ? dot(value[i], q_tile[a * K_QUADS + min(quad, K_QUADS - 1)]) : 0.0;
                        }
                    }
                }
            }
            [[unroll]] for (uint a = 0; a < HEADS; ++a) {
                if (LANES > 1) {
                    dots[a * LOCAL + thread] = s[a];
                } else {
                    s[a] = valid ? CAPPED(s[a]) : NEG_LARGE;
                    score[a * CELL_BLOCK + at_key] = s[a];
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
                score[e] = j >= first_valid && j < n_valid ? CAPPED(sum) : NEG_LARGE;
            }
        } else {
            [[unroll]] for (uint a = 0; a < HEADS; ++a) dots[a * LOCAL + thread] = top[a];
        }
        barrier();

        for (uint e = thread; e < SCORES; e += LOCAL) {
            const uint a = e / CELL_BLOCK;
            const float m = head_max[now * HEADS + a];
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
                head_max[(1 - now) * HEADS + a] = m_new;
                head_rescale[a] = exp(m - m_new);
            }
        }
        now = 1 - now;
        barrier();

        [[unroll]] for (uint a = 0; a < HEADS; ++a) {
            const float rescale = head_rescale[a];
            l[a] *= rescale;
            [[unroll]] for (uint i = 0; i < V_ROUNDS; ++i) acc[a * V_ROUNDS + i] *= rescale;
        }
        for (uint first = V_BATCH * V_GROUPS > 1 ? 0 : first_valid; first < n_valid; first += V_BATCH * V_GROUPS) {
            vec4 value[V_BATCH * V_ROUNDS]; // where a key is not seen, one that is seen is read
            [[unroll]] for (uint u = 0; u < V_BATCH; ++u) {
                const uint j = clamp(first + v_group + u * V_GROUPS, first_valid, n_valid - 1);
                const uint base = (CELL(j) * n_kv + kv_head) * V_QUADS;
                [[unroll]] for (uint i = 0; i < V_ROUNDS; ++i) {
                    const uint at = u * V_ROUNDS + i;
                    if (V_WORDS) {
                        const uint behind = v_quad0 / 8 * halves_of(V_TYPE);
                        value[at] = v_block_quad(v_off + base / 16 * halves_of(V_TYPE), behind, v_quad0 % 8);
                    } else {
                        value[at] = v_quad(base + min(v_quad0 + i * LOCAL, V_QUADS - 1));
                    }
                }
            }
            [[unroll]] for (uint u = 0; u < V_BATCH; ++u) {
                const uint j = first + v_group + u * V_GROUPS;
                [[unroll]] for (uint a = 0; a < HEADS; ++a) {
                    const float weight = prob[a * CELL_BLOCK + min(j, CELL_BLOCK - 1)]; // zero for keys not seen
                    const float p = V_EXACT || j < CELL_BLOCK ? weight : 0.0;
                    l[a] += p;
                    [[unroll]] for (uint i = 0; i < V_ROUNDS; ++i) acc[a * V_ROUNDS + i] += p * value[u * V_ROUNDS + i];
                }
            }
        }
    }

    [[unroll]] for (uint a = 0; a < HEADS; ++a) {
        float sum = l[a];
        if (V_GROUPS > 1) { // then there is one round
            barrier();
            group_acc[thread] = acc[a];
            group_l[thread] = l[a];
            barrier();
            if (thread < V_QUADS) {
                // The bounds depend on the thread, so that no compiler unrolls this once per head.
                for (uint at = V_QUADS + thread; at < V_GROUPS * V_QUADS; at += V_QUADS) {
                    acc[a] += group_acc[at];
                    sum += group_l[at];
                }
            }
        }
        if (a >= begin_head && a < end_head && thread < V_QUADS) {
            const uint head = uint(first_head + int(a));
            const float m = head_max[now * HEADS + a];
            uint base = part_off + ((row * n_heads + head) * n_splits + split) * (HEAD_V + 2);
            float factor = 1.0;
            if (FINAL != 0) {
                base = part_off + (row * n_heads + head) * HEAD_V;
                factor = INVERSE_SUM(m, sum, head);
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
    }
}
