// Compute a tile of a product on matrix units, from slices of w and x in shared memory. The tile has SM x SN
// subgroups with FM x FN matrices each. The including file defines row_at(i), which returns the address in w
// of the tile's row i. A thread loads all its values of a slice before it unpacks the first, so that loads
// overlap.
uint row_at(uint i);

#define CODES_ONLY
#include "lib/quants.glsl"

const uint TM = M * FM * SM;
const uint TN = N * FN * SN;
const uint TK = 32;
const uint STRIDE = TK / 4 + 2; // 8 rows begin at different memory banks

shared QUAD w_tile[TM * STRIDE]; // [row of w][k]
shared QUAD x_tile[TN * STRIDE]; // [row of x][k]
shared float results[SM * SN * M * N]; // one matrix [row of x][row of w] per subgroup

#ifdef NO_CODES
const uint PIECE = 8; // elements of w
#else
const uint PIECE = 16;
#endif
const uint W_PIECES = TK / PIECE;
const uint W_ROUNDS = (TM * W_PIECES + LOCAL - 1) / LOCAL;
const uint X_PIECES = TK / 8; // pieces of 16 bytes
const uint X_ROUNDS = (TN * X_PIECES + LOCAL - 1) / LOCAL;

uint piece(uint round) { return gl_LocalInvocationID.x + round * LOCAL; }

uint w_row_of(uint round) { return piece(round) / W_PIECES; } // may exceed the last row of the tile

uint x_row_of(uint round) { return piece(round) / X_PIECES; }

// Clamp values to the range of F16. Formats with codes clamp `scale` and `low` instead.
vec4 cut(vec4 value) { return clamp(value, -65504.0, 65504.0); }

#if defined(HAS_TAIL)
const uint RAW = PIECE * BLOCK_NBYTES / 16; // units of 16 bytes in a piece

#ifndef WIDE_W
#define WIDE_W false
#endif

// If WIDE_W is set, return the word at which the thread's piece of the first slice begins. Otherwise return
// the byte at which the row begins.
uint w_place(uint round) {
    const uint start = row_at(w_row_of(round));
    return WIDE_W ? (start + piece(round) % W_PIECES * PIECE * BLOCK_NBYTES) / 4 : start;
}

QUAD quad_at(uvec4 raw[RAW], uint j) { // elements 4 j..4 j + 3 of a piece
#if defined(TYPE_F32)
    return quad_of(cut(uintBitsToFloat(raw[j])));
#elif defined(TYPE_F16)
    return quad_of(j == 0 ? raw[0].xy : raw[0].zw); // already F16
#else
    return quad_of(cut(floats_of(j == 0 ? raw[0].xy : raw[0].zw)));
#endif
}

void hold_w(uint w_at[W_ROUNDS], uint k, uint n) {
    // Only unaligned rows and the last slice need this loop, so it is not unrolled.
    if (!WIDE_W && (n % 2 != 0 || k + TK > n)) {
        [[dont_unroll]] for (uint e = gl_LocalInvocationID.x; e < TM * TK / 4; e += LOCAL) {
            const uint of = e / (TK / 4), first = k + 4 * (e % (TK / 4));
            const uint start = row_at(of);
            vec4 value = vec4(0.0);
            [[unroll]] for (uint c = 0; c < 4; ++c) {
                if (first + c < n) value[c] = dequant1(start, first + c);
            }
            w_tile[of * STRIDE + e % (TK / 4)] = quad_of(cut(value));
        }
        return;
    }
    uvec4 raw[W_ROUNDS][RAW];
    [[unroll]] for (uint j = 0; j < W_ROUNDS; ++j) {
        const uint begin = WIDE_W ? w_at[j] + k * BLOCK_NBYTES / 4
                                  : (w_at[j] + (k + piece(j) % W_PIECES * PIECE) * BLOCK_NBYTES) / 4;
        [[unroll]] for (uint c = 0; c < RAW; ++c) raw[j][c] = words4_at(begin + 4 * c);
    }
    [[unroll]] for (uint j = 0; j < W_ROUNDS; ++j) {
        if (TM * W_PIECES % LOCAL != 0 && piece(j) >= TM * W_PIECES) continue;
        const uint at = w_row_of(j) * STRIDE + piece(j) % W_PIECES * (PIECE / 4);
        [[unroll]] for (uint c = 0; c < PIECE / 4; ++c) w_tile[at + c] = quad_at(raw[j], c);
    }
}
#else
uint w_place(uint round) { return row_at(w_row_of(round)); }

void hold_w(uint w_at[W_ROUNDS], uint k, uint n) {
    [[unroll]] for (uint j = 0; j < W_ROUNDS; ++j) {
        if (TM * W_PIECES % LOCAL != 0 && piece(j) >= TM * W_PIECES) continue;
        const uint part = piece(j) % W_PIECES * PIECE;
        const uint at = w_row_of(j) * STRIDE + part / 4;
#ifdef NO_CODES
        const mat2x4 both = dequant8(w_at[j], k + part);
        [[unroll]] for (uint c = 0; c < 2; ++c) w_tile[at + c] = quad_of(cut(both[c]));
#else
        const Quants q = quants16(w_at[j], k, part);
#ifdef HAS_LOW
        const float scale = clamp(q.scale, -32752.0 / CODE_END, 32752.0 / CODE_END);
        const float low = clamp(q.low, -32752.0, 32752.0);
#else
        const float scale = clamp(q.scale, -65504.0 / CODE_END, 65504.0 / CODE_END);
        const float low = 0.0;
#endif
#ifdef SIGNED_CODES
        const uvec4 codes = q.codes ^ 0x80808080u;
        const float zero = low - float(CODE_END) * scale;
#else
        const uvec4 codes = q.codes;
        const float zero = low - float(CODE_OFFSET) * scale;
#endif
        [[unroll]] for (uint c = 0; c < 4; ++c) {
            w_tile[at + c] = quad_of(fma(vec4(codes4(codes[c], 0, 0xFFu)), vec4(scale), vec4(zero)));
        }
#endif
    }
}
#endif

// Copy TK elements of each row of w and x, from element k on, to shared memory. Rows have n elements. `w_at`
// holds the results of w_place. The thread's piece j of the first slice is x4[x_at[j]].
void hold_slice(uint w_at[W_ROUNDS], uint x_at[X_ROUNDS], uint k, uint n) {
    uvec4 halves[X_ROUNDS];
    [[unroll]] for (uint j = 0; j < X_ROUNDS; ++j) halves[j] = x4[x_at[j] + k / 8];
    hold_w(w_at, k, n);
    [[unroll]] for (uint j = 0; j < X_ROUNDS; ++j) {
        if (TN * X_PIECES % LOCAL != 0 && piece(j) >= TN * X_PIECES) continue;
        const uint at = x_row_of(j) * STRIDE + piece(j) % X_PIECES * 2;
        x_tile[at] = quad_of(halves[j].xy);
        x_tile[at + 1] = quad_of(halves[j].zw);
    }
}
