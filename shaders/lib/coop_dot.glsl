// Compute a tile of an int8 product on matrix units. Slices of w's codes (lib/quants.glsl) and of x in 8 bits
// (lib/q8.glsl) are copied to shared memory. The dot product of two blocks of 32 elements is multiplied by
// both blocks' scales.
#extension GL_KHR_memory_scope_semantics : require
#extension GL_KHR_shader_subgroup_basic : require
#extension GL_EXT_shader_explicit_arithmetic_types_int8 : require
#extension GL_KHR_cooperative_matrix : require
#define CODES_ONLY
#include "lib/quants.glsl"

#define CODES_A coopmat<int8_t, gl_ScopeSubgroup, M, K, gl_MatrixUseA>
#define CODES_B coopmat<int8_t, gl_ScopeSubgroup, K, N, gl_MatrixUseB>
#define MATRIX_DOTS coopmat<int, gl_ScopeSubgroup, M, N, gl_MatrixUseAccumulator>
#define MATRIX_SUM coopmat<float, gl_ScopeSubgroup, M, N, gl_MatrixUseAccumulator>
// Load a matrix of K codes per row, beginning at row `row` of the tile and element k of the slice.
#define LOAD_W_CODES(m, row, k) \
    coopMatLoad(m, w_codes, (row) * STRIDE + (k) / 8, STRIDE, gl_CooperativeMatrixLayoutRowMajor)
#define LOAD_X_CODES(m, row, k) \
    coopMatLoad(m, x_codes, (row) * STRIDE + (k) / 8, STRIDE, gl_CooperativeMatrixLayoutColumnMajor)
// Load a matrix whose columns (or rows) are all equal, with a stride of 0.
#define LOAD_COLUMN(m, from, at) coopMatLoad(m, from, at, 0, gl_CooperativeMatrixLayoutColumnMajor)
#define LOAD_ROW(m, from, at) coopMatLoad(m, from, at, 0, gl_CooperativeMatrixLayoutRowMajor)

const uint TM = M * FM * SM;
const uint TN = N * FN * SN;
// With TK = 64, subgroups of up to 16 lanes (Intel) spilled 36 registers.
const uint TK = LANES > 16 ? 64 : 32;
const uint BLOCKS = TK / 32;
const uint PIECES = TK / 16; // pieces of 16 codes per row
const uint STRIDE = TK / 8 + 2; // units of 8 codes; 8 rows begin at different memory banks
const uint W_ROUNDS = (TM * PIECES + LOCAL - 1) / LOCAL;
const uint X_ROUNDS = (TN * PIECES + LOCAL - 1) / LOCAL;

shared uvec2 w_codes[TM * STRIDE]; // [row of w][k]
shared uvec2 x_codes[TN * STRIDE]; // [row of x][k]
shared float w_scale[BLOCKS * TM]; // [block][row of w]
shared float x_scale[BLOCKS * TN]; // [block][row of x]
#ifdef HAS_LOW
shared float w_low[BLOCKS * TM];
shared float x_sum[BLOCKS * TN]; // sum of a block's dequantized values
#endif

uint piece(uint round) { return gl_LocalInvocationID.x + round * LOCAL; }

uint w_row_of(uint round) { return piece(round) / PIECES; } // may exceed the last row of the tile

uint x_row_of(uint round) { return piece(round) / PIECES; }

uvec4 x_codes_at(uint at) {
    if (WIDE != 0) return x4[at / 4];
    return uvec4(x[at], x[at + 1], x[at + 2], x[at + 3]);
}

// Subtract CODE_OFFSET from the four unsigned codes of each word.
uvec4 signed_codes(uvec4 codes) {
#ifndef SIGNED_CODES
    if (CODE_OFFSET != 0) return (codes + (128 - CODE_OFFSET) * 0x01010101u) ^ 0x80808080u;
#endif
    return codes;
}

// Copy TK elements of each row of w and x, from element k on, to shared memory. Rows have n elements. The
// thread's rows begin at `w_at` and `x_at`. Scales of w after the row's end are 0.
void hold_slice(uint w_at[W_ROUNDS], uint x_at[X_ROUNDS], uint k, uint n) {
    uvec4 codes[X_ROUNDS];
    uvec2 block[X_ROUNDS];
    [[unroll]] for (uint j = 0; j < X_ROUNDS; ++j) {
        const uint i = min(k + piece(j) % PIECES * 16, n - 16);
        codes[j] = x_codes_at(x_at[j] + i / 4);
        const uint of = x_at[j] + q8_block(n, i);
        block[j] = uvec2(x[of], x[of + 1]);
    }
    [[unroll]] for (uint j = 0; j < W_ROUNDS; ++j) {
        if (TM * PIECES % LOCAL != 0 && piece(j) >= TM * PIECES) continue;
        const uint first = k + piece(j) % PIECES * 16, part = first % 32;
        const Quants q = quants16(w_at[j], min(first - part, n - 32), part);
        const uvec4 own = signed_codes(q.codes);
        const uint place = w_row_of(j) * STRIDE + piece(j) % PIECES * 2;
        w_codes[place] = own.xy;
        w_codes[place + 1] = own.zw;
        if (part == 0) {
            const uint at = piece(j) % PIECES / 2 * TM + w_row_of(j);
            w_scale[at] = first < n ? q.scale : 0.0;
#ifdef HAS_LOW
            w_low[at] = first < n ? q.low : 0.0;
#endif
        }
    }
    [[unroll]] for (uint j = 0; j < X_ROUNDS; ++j) {
        if (TN * PIECES % LOCAL != 0 && piece(j) >= TN * PIECES) continue;
        const uint place = x_row_of(j) * STRIDE + piece(j) % PIECES * 2;
        x_codes[place] = codes[j].xy;
        x_codes[place + 1] = codes[j].zw;
        if (piece(j) % 2 == 0) {
            const uint at = piece(j) % PIECES / 2 * TN + x_row_of(j);
            x_scale[at] = uintBitsToFloat(block[j].x);
#ifdef HAS_LOW
            x_sum[at] = uintBitsToFloat(block[j].x) * float(q8_sum32(block[j].y));
#endif
        }
    }
}
