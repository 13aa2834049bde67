// Compute the tiles of mat_mul and mat_mul_id: 64 rows of w by 8 * RN rows of x. Each of 16 x 8 threads
// computes 4 * RN values. Slices of 32 elements along k take 12.3 KiB of shared memory.

const uint TM = 64;
const uint TK = 32;
const uint M_THREADS = 16;
const uint N_THREADS = 8; // LOCAL is M_THREADS * N_THREADS
const uint TN = N_THREADS * RN;
const uint W_STRIDE = TM + 1; // odd, so that transposed writes use different memory banks
const uint X_STRIDE = TN + 1;

shared float w_tile[TK * W_STRIDE]; // [k][row of w]
shared float x_tile[TK * X_STRIDE]; // [k][row of x]

void hold_w(uint i, uint k, vec4 value) {
    [[unroll]] for (uint j = 0; j < 4; ++j) w_tile[(k + j) * W_STRIDE + i] = value[j];
}

void hold_x(uint r, uint k, float value) { x_tile[k * X_STRIDE + r] = value; }

void add_slice(inout vec4 sum[RN]) {
    const uint tm = gl_LocalInvocationID.x % M_THREADS;
    const uint tn = gl_LocalInvocationID.x / M_THREADS;
    for (uint k = 0; k < TK; ++k) {
        const uint at = k * W_STRIDE + tm;
        const vec4 wv = vec4(w_tile[at], w_tile[at + 16], w_tile[at + 32], w_tile[at + 48]);
        [[unroll]] for (uint c = 0; c < RN; ++c) sum[c] += wv * x_tile[k * X_STRIDE + tn + c * N_THREADS];
    }
}
