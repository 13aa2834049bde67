// The tiles of mat_mul_dot and mat_mul_dot_id: 64 rows of w by 8 RN rows of x, each of 16 x 8 threads 4 by RN values of
// it, from slices of 32 k as packed codes in shared memory (4.5 KiB). The including file declares `uint w[]`, `uint x[]`
// and RN, and includes lib/dequant.glsl, lib/q8.glsl and lib/quants.glsl.

const uint TM = 64; // rows of w in a tile
const uint TK = 32; // elements of k in a slice: a block of x
const uint M_THREADS = 16;
const uint N_THREADS = 8; // LOCAL is M_THREADS * N_THREADS
const uint TN = N_THREADS * RN; // rows of x in a tile
const uint WORDS = TK / 4;
const uint W_STRIDE = TM + 1; // odd, so that the transposing writes spread over the banks
const uint X_STRIDE = TN + 1;
const uint GROUPS = TK / GROUP;

shared uint w_codes[WORDS * W_STRIDE]; // [word][row of w]
shared vec2 w_scale[GROUPS * TM]; // scale and low: [group][row of w]
shared uint x_codes[WORDS * X_STRIDE]; // [word][row of x]
shared float x_scale[TN];
shared uint x_sums[TN];

vec4 sum[RN]; // rows tm, tm + 16, tm + 32, tm + 48 of the tile, where tm = thread % M_THREADS

// Half a row's slice: 16 elements from k on of row i of the tile, which starts at `start` in w.
void hold_w(uint i, uint start, uint k) {
    const uint part = k / 16 % 2;
    const Quants q = quants16(start, k - 16 * part, 16 * part);
    [[unroll]] for (uint j = 0; j < 4; ++j) w_codes[(4 * part + j) * W_STRIDE + i] = q.codes[j];
    if (part < GROUPS) w_scale[part * TM + i] = vec2(q.scale, q.low);
}

// Word j of the slice from k on of row r of the tile, which starts at `row` in x and has `width` elements.
void hold_x(uint r, uint j, uint row, uint width, uint k) {
    x_codes[j * X_STRIDE + r] = x[row + k / 4 + j];
    if (j == 0) {
        x_scale[r] = uintBitsToFloat(x[row + q8_block(width, k)]);
        x_sums[r] = x[row + q8_block(width, k) + 1];
    }
}

// Adds the products of the slice.
void add_slice() {
    const uint tm = gl_LocalInvocationID.x % M_THREADS;
    const uint tn = gl_LocalInvocationID.x / M_THREADS;
    [[unroll]] for (uint g = 0; g < GROUPS; ++g) {
        ivec4 dots[RN];
        [[unroll]] for (uint c = 0; c < RN; ++c) dots[c] = ivec4(-CODE_OFFSET * group_sum(x_sums[tn + c * N_THREADS], 16 * g));
        for (uint j = g * GROUP / 4; j < (g + 1) * GROUP / 4; ++j) {
            const uint at = j * W_STRIDE + tm;
            const ivec4 wv = ivec4(w_codes[at], w_codes[at + 16], w_codes[at + 32], w_codes[at + 48]);
            [[unroll]] for (uint c = 0; c < RN; ++c) {
                const int xv = int(x_codes[j * X_STRIDE + tn + c * N_THREADS]);
                dots[c] += ivec4(dot4(wv.x, xv, 0), dot4(wv.y, xv, 0), dot4(wv.z, xv, 0), dot4(wv.w, xv, 0));
            }
        }
        const uint at = g * TM + tm;
        const vec2 s[4] = vec2[](w_scale[at], w_scale[at + 16], w_scale[at + 32], w_scale[at + 48]);
        [[unroll]] for (uint c = 0; c < RN; ++c) {
            vec4 value = vec4(s[0].x, s[1].x, s[2].x, s[3].x) * vec4(dots[c]);
#ifdef HAS_LOW
            value += vec4(s[0].y, s[1].y, s[2].y, s[3].y) * float(group_sum(x_sums[tn + c * N_THREADS], 16 * g));
#endif
            sum[c] += x_scale[tn + c * N_THREADS] * value;
        }
    }
}
