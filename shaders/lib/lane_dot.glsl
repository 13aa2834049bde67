// The inner loop of mat_lane and mat_lane_id. Each thread multiplies its row of w by N rows of x, which all
// threads share. Both w and x are addresses. The including file first includes lib/dequant.glsl with HOLD.

const uint ROUND = 32; // elements of x that a subgroup shuffles at a time

float sum[N];
uint x_row[N];

// Multiply the row of w at address `start`, which has k elements. All threads must call this function.
void lane_dot(uint start, uint k) {
    [[unroll]] for (uint r = 0; r < N; ++r) sum[r] = 0.0;
    const uint whole = k / HELD * HELD;
    for (uint i = 0; i < whole; i += HELD) {
        hold(start + i / ROW_UNIT * BLOCK_NBYTES);
        [[unroll]] for (uint j = 0; j < HELD; j += ROUND) {
            float xs[N][ROUND / SUBGROUP];
            [[unroll]] for (uint r = 0; r < N; ++r) {
                [[unroll]] for (uint s = 0; s < ROUND / SUBGROUP; ++s) {
                    xs[r][s] = x.at[x_row[r] + i + j + s * SUBGROUP + gl_SubgroupInvocationID % SUBGROUP];
                }
            }
            [[unroll]] for (uint l = 0; l < ROUND; l += 4) {
                const vec4 wv = dequant4(0, j + l);
                [[unroll]] for (uint r = 0; r < N; ++r) {
                    vec4 xv;
                    [[unroll]] for (uint c = 0; c < 4; ++c) {
                        xv[c] = subgroupShuffle(xs[r][(l + c) / SUBGROUP], (l + c) % SUBGROUP);
                    }
                    sum[r] += dot(wv, xv);
                }
            }
        }
    }
#ifdef HAS_TAIL
    for (uint i = whole; i < k; ++i) {
        const float wv = tail1(start + i * BLOCK_NBYTES);
        [[unroll]] for (uint r = 0; r < N; ++r) sum[r] += wv * x.at[x_row[r] + i];
    }
#endif
}
