#version 450
#extension GL_GOOGLE_include_directive : require
// y[r, i] = sum over k of w[i, k] * x[r, k] for many rows of x in 8 bits: dot products of integers. A workgroup of 16 x 8
// threads makes a tile of 64 rows of w by 8 RN rows of x, each thread 4 by RN values of it, from slices of 32 k as packed
// codes in shared memory (4.5 KiB).
#include "lib/types.glsl"

layout(constant_id = 1) const uint RN = 4; // rows of x per thread, 1..4

layout(push_constant) uniform Push {
    uint w_off, x_off, b_off, y_off;
    uint k, n, n_rows, y_stride, has_bias;
};
layout(set = 0, binding = 0) readonly buffer W { uint w[]; };
layout(set = 0, binding = 1) readonly buffer X { uint x[]; };
layout(set = 0, binding = 2) readonly buffer B { float b[]; };
layout(set = 0, binding = 3) writeonly buffer Y { float y[]; };
#include "lib/dequant.glsl"
#include "lib/q8.glsl"
#include "lib/quants.glsl"

const uint TM = 64; // rows of w in a tile
const uint TK = 32; // elements of k in a slice: a block of x
const uint M_THREADS = 16;
const uint N_THREADS = 8; // LOCAL is M_THREADS * N_THREADS
const uint TN = N_THREADS * RN;
const uint WORDS = TK / 4;
const uint W_STRIDE = TM + 1; // odd, so that the transposing writes spread over the banks
const uint X_STRIDE = TN + 1;
const uint GROUPS = TK / GROUP;

shared uint w_codes[WORDS * W_STRIDE]; // [word][row of w]
shared vec2 w_scale[GROUPS * TM]; // scale and low: [group][row of w]
shared uint x_codes[WORDS * X_STRIDE]; // [word][row of x]
shared float x_scale[TN];
shared uint x_sums[TN];

int group_sum(uint sums, uint group) { return GROUP == 32 ? q8_sum32(sums) : q8_sum16(sums, 16 * group); }

void main() {
    const uint thread = gl_LocalInvocationID.x;
    const uint first_i = group_index() * TM;
    if (first_i >= n) return;
    const uint first_r = gl_WorkGroupID.z * TN;
    const uint tm = thread % M_THREADS;
    const uint tn = thread / M_THREADS;

    vec4 sum[RN]; // rows tm, tm + 16, tm + 32, tm + 48 of the tile
    for (uint c = 0; c < RN; ++c) sum[c] = vec4(0.0);

    for (uint slice = 0; slice < k; slice += TK) {
        for (uint e = thread; e < TM * 2; e += LOCAL) { // two neighbouring threads have a row's 32 elements
            const uint i = e / 2;
            const uint half_of = e % 2;
            const Quants q = quants16(row_start(min(first_i + i, n - 1), k), slice + 16 * half_of);
            for (uint j = 0; j < 4; ++j) w_codes[(4 * half_of + j) * W_STRIDE + i] = q.codes[j];
            if (half_of < GROUPS) w_scale[half_of * TM + i] = vec2(q.scale, q.low);
        }
        for (uint e = thread; e < TN * WORDS; e += LOCAL) {
            const uint r = first_r + e / WORDS;
            const uint at = x_off + min(r, n_rows - 1) * q8_row_words(k);
            x_codes[e % WORDS * X_STRIDE + e / WORDS] = x[at + slice / 4 + e % WORDS];
        }
        for (uint e = thread; e < TN; e += LOCAL) {
            const uint at = x_off + min(first_r + e, n_rows - 1) * q8_row_words(k) + q8_block(k, slice);
            x_scale[e] = uintBitsToFloat(x[at]);
            x_sums[e] = x[at + 1];
        }
        barrier();
        for (uint g = 0; g < GROUPS; ++g) {
            ivec4 dots[RN];
            for (uint c = 0; c < RN; ++c) {
                dots[c] = ivec4(-CODE_OFFSET * group_sum(x_sums[tn + c * N_THREADS], g));
            }
            for (uint j = g * GROUP / 4; j < (g + 1) * GROUP / 4; ++j) {
                const uint at = j * W_STRIDE + tm;
                const ivec4 wv = ivec4(w_codes[at], w_codes[at + 16], w_codes[at + 32], w_codes[at + 48]);
                for (uint c = 0; c < RN; ++c) {
                    const int xv = int(x_codes[j * X_STRIDE + tn + c * N_THREADS]);
                    dots[c].x += dot4(wv.x, xv, 0);
                    dots[c].y += dot4(wv.y, xv, 0);
                    dots[c].z += dot4(wv.z, xv, 0);
                    dots[c].w += dot4(wv.w, xv, 0);
                }
            }
            const uint at = g * TM + tm;
            const vec2 s[4] = vec2[](w_scale[at], w_scale[at + 16], w_scale[at + 32], w_scale[at + 48]);
            for (uint c = 0; c < RN; ++c) {
                vec4 value = vec4(s[0].x, s[1].x, s[2].x, s[3].x) * vec4(dots[c]);
#ifdef HAS_LOW
                value += vec4(s[0].y, s[1].y, s[2].y, s[3].y) * float(group_sum(x_sums[tn + c * N_THREADS], g));
#endif
                sum[c] += x_scale[tn + c * N_THREADS] * value;
            }
        }
        barrier();
    }

    for (uint c = 0; c < RN; ++c) {
        const uint r = first_r + tn + c * N_THREADS;
        if (r >= n_rows) continue;
        for (uint a = 0; a < 4; ++a) {
            const uint i = first_i + tm + a * M_THREADS;
            if (i < n) y[y_off + r * y_stride + i] = sum[c][a] + (has_bias != 0 ? b[b_off + i] : 0.0);
        }
    }
}
