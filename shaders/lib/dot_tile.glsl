// The tiles of mat_mul_dot and mat_mul_dot_id: 64 rows of w by 8 RN rows of x, each of 16 x 8 threads 4 by RN values of
// it, from slices of 64 k as packed codes in shared memory (at most 13.5 KiB). The including file declares `uint w[]`,
// `uint x[]` and RN, and includes lib/dequant.glsl, lib/q8.glsl and lib/quants.glsl.
//
// A thread reads all that it has of a slice before it keeps any of it, 16 codes at a time, so that loads are under way
// together; products take 16 codes of a row by one read of shared memory.

const uint TM = 64; // rows of w in a tile
const uint TK = 64; // elements of k in a slice: two blocks of x
const uint M_THREADS = 16;
const uint N_THREADS = 8; // LOCAL is M_THREADS * N_THREADS
const uint TN = N_THREADS * RN; // rows of x in a tile
const uint PIECES = TK / 16; // of a row, 16 codes each
const uint STRIDE = PIECES + 1; // 20 words: eight rows of four begin at different banks
const uint GROUPS = TK / GROUP;
const uint W_ROUNDS = TM * PIECES / (M_THREADS * N_THREADS);
const uint X_ROUNDS = (TN * PIECES + M_THREADS * N_THREADS - 1) / (M_THREADS * N_THREADS);

shared uvec4 w_codes[TM * STRIDE]; // [row of w][piece]
shared vec2 w_scale[GROUPS * TM]; // scale and low: [group][row of w]
shared uvec4 x_codes[TN * STRIDE]; // [row of x][piece]
shared uvec2 x_block[TK / 32 * TN]; // scale and sums: [block][row of x]

vec4 sum[RN]; // rows tm, tm + 16, tm + 32, tm + 48 of the tile, where tm = thread % M_THREADS

uint piece(uint round) { return gl_LocalInvocationID.x + round * (M_THREADS * N_THREADS); }

uint w_row_of(uint round) { return piece(round) / PIECES; } // in the tile, as all below

uint x_row_of(uint round) { return min(piece(round) / PIECES, TN - 1); }

// The slice from element k on of n. w_at: where a thread's rows of w start; x_at: its rows of x, of `width` elements.
void hold_slice(uint w_at[W_ROUNDS], uint x_at[X_ROUNDS], uint width, uint k, uint n) {
    uvec4 codes[X_ROUNDS];
    uvec2 block[X_ROUNDS];
    [[unroll]] for (uint j = 0; j < X_ROUNDS; ++j) {
        const uint i = min(k + piece(j) % PIECES * 16, n - 16); // what is beyond meets zeros of w
        const uint at = x_at[j] + i / 4;
        codes[j] = uvec4(x[at], x[at + 1], x[at + 2], x[at + 3]);
        const uint of = x_at[j] + q8_block(width, i);
        block[j] = uvec2(x[of], x[of + 1]);
    }
    [[unroll]] for (uint j = 0; j < W_ROUNDS; ++j) {
        const uint first = k + piece(j) % PIECES * 16; // a slice ends with a whole block, or in its middle
        const uint part = first % 32;
        const Quants q = quants16(w_at[j], min(first - part, n - 32), part);
        const bool inside = first < n;
        w_codes[w_row_of(j) * STRIDE + piece(j) % PIECES] = q.codes;
        if (part < 32 / GROUP * 16) {
            const uint g = piece(j) % PIECES * 16 / GROUP;
            w_scale[g * TM + w_row_of(j)] = inside ? vec2(q.scale, q.low) : vec2(0.0);
        }
    }
    [[unroll]] for (uint j = 0; j < X_ROUNDS; ++j) {
        if (TN * PIECES % (M_THREADS * N_THREADS) != 0 && piece(j) >= TN * PIECES) continue;
        x_codes[x_row_of(j) * STRIDE + piece(j) % PIECES] = codes[j];
        if (piece(j) % 2 == 0) x_block[piece(j) % PIECES / 2 * TN + x_row_of(j)] = block[j];
    }
}

void add_piece(inout ivec4 dots[RN], uint p, uint tm, uint tn) {
    uvec4 wv[4];
    [[unroll]] for (uint a = 0; a < 4; ++a) wv[a] = w_codes[(tm + a * M_THREADS) * STRIDE + p];
    [[unroll]] for (uint c = 0; c < RN; ++c) {
        const uvec4 xv = x_codes[(tn + c * N_THREADS) * STRIDE + p];
        [[unroll]] for (uint j = 0; j < 4; ++j) { // in a row, each dot adds to the one before
            const int v = int(xv[j]);
            dots[c] += ivec4(dot4(int(wv[0][j]), v, 0), dot4(int(wv[1][j]), v, 0), dot4(int(wv[2][j]), v, 0),
                dot4(int(wv[3][j]), v, 0));
        }
    }
}

// Adds the products of the slice.
void add_slice() {
    const uint tm = gl_LocalInvocationID.x % M_THREADS;
    const uint tn = gl_LocalInvocationID.x / M_THREADS;
    [[unroll]] for (uint g = 0; g < GROUPS; ++g) {
        const uint b = g * GROUP / 32 * TN + tn; // of the block of x
        ivec4 dots[RN];
        [[unroll]] for (uint c = 0; c < RN; ++c) {
            dots[c] = ivec4(-CODE_OFFSET * group_sum(x_block[b + c * N_THREADS].y, g * GROUP % 32));
        }
        add_piece(dots, g * GROUP / 16, tm, tn);
        // The second piece is no loop: RADV would not unroll it, and would copy the sums.
        if (GROUP == 32) add_piece(dots, 2 * g + 1, tm, tn);
        const uint at = g * TM + tm;
        const vec2 s[4] = vec2[](w_scale[at], w_scale[at + 16], w_scale[at + 32], w_scale[at + 48]);
        [[unroll]] for (uint c = 0; c < RN; ++c) {
            const uvec2 block = x_block[b + c * N_THREADS];
            vec4 value = vec4(s[0].x, s[1].x, s[2].x, s[3].x) * vec4(dots[c]);
#ifdef HAS_LOW
            value += vec4(s[0].y, s[1].y, s[2].y, s[3].y) * float(group_sum(block.y, g * GROUP % 32));
#endif
            sum[c] += uintBitsToFloat(block.x) * value;
        }
    }
}
