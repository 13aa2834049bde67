// Compute the tiles of mat_mul_dot and mat_mul_dot_id: 64 rows of w by 8 * RN rows of x. Each of 16 x 8
// threads computes 4 * RN values. The threads copy slices of 64 elements along k to shared memory as packed
// codes (at most 13.5 KiB). A thread loads all its values of a slice before it stores the first, so that
// loads overlap.

const uint TM = 64;
const uint TK = 64; // two blocks of x
const uint M_THREADS = 16;
const uint N_THREADS = 8; // LOCAL is M_THREADS * N_THREADS
const uint TN = N_THREADS * RN;
const uint PIECES = TK / 16; // pieces of 16 codes per row
const uint STRIDE = PIECES + 1; // eight rows begin at different memory banks
const uint GROUPS = TK / GROUP;
const uint X_ROUNDS = (TN * PIECES + M_THREADS * N_THREADS - 1) / (M_THREADS * N_THREADS);

// FUSED: integer dot products start at the bits of the float BIAS = 1.5 * 2^23. Because |dot| <= 2^19 for 32
// products, each sum has the bits of the float BIAS + dot. Then one fma converts and scales the dot product.
// BIAS * scale is exact, because a scale has at most 19 bits. CPU drivers do not use FUSED, because they
// round an fma twice. The normalised mean squared error would be up to 1e-6.
const float BIAS = 12582912.0;

shared uvec4 w_codes[TM * STRIDE]; // [row of w][piece]: code - CODE_OFFSET
shared vec2 w_scale[GROUPS * TM]; // scale and low: [group][row of w]
shared uvec4 x_codes[TN * STRIDE]; // [row of x][piece]
shared uvec2 x_block[TK / 32 * TN]; // scale and sums: [block][row of x]

vec4 sum[RN]; // rows tm, tm + 16, tm + 32, tm + 48 of the tile, where tm = thread % M_THREADS

uint piece(uint round) { return gl_LocalInvocationID.x + round * (M_THREADS * N_THREADS); }

uint w_row() { return gl_LocalInvocationID.x / (TK / 32); }

uint w_block() { return gl_LocalInvocationID.x % (TK / 32); }

uint x_row_of(uint round) { return min(piece(round) / PIECES, TN - 1); }

// Copy TK elements of each row of w and x, from element k on, to shared memory. The thread's rows begin at
// `w_at` and `x_at`. Rows of w have n elements, and rows of x have `width` elements.
void hold_slice(uint w_at, uint x_at[X_ROUNDS], uint width, uint k, uint n) {
    uvec4 codes[X_ROUNDS];
    uvec2 block[X_ROUNDS];
    [[unroll]] for (uint j = 0; j < X_ROUNDS; ++j) {
        // Elements of x after n are multiplied by zeros.
        const uint i = min(k + piece(j) % PIECES * 16, n - 16);
        const uint at = x_at[j] + i / 4;
        codes[j] = uvec4(x[at], x[at + 1], x[at + 2], x[at + 3]);
        const uint of = x_at[j] + q8_block(width, i);
        block[j] = uvec2(x[of], x[of + 1]);
    }
    const uint first = k + w_block() * 32; // the last slice may have only one block
    [[unroll]] for (uint part = 0; part < 32; part += 16) {
        const Quants q = quants16(w_at, min(first, n - 32), part);
        w_codes[w_row() * STRIDE + w_block() * 2 + part / 16] = signed_codes(q.codes);
        if (part % GROUP != 0) continue;
        const uint g = w_block() * (32 / GROUP) + part / GROUP;
        w_scale[g * TM + w_row()] = first < n ? vec2(q.scale, q.low) : vec2(0.0);
    }
    [[unroll]] for (uint j = 0; j < X_ROUNDS; ++j) {
        if (TN * PIECES % (M_THREADS * N_THREADS) != 0 && piece(j) >= TN * PIECES) continue;
        x_codes[x_row_of(j) * STRIDE + piece(j) % PIECES] = codes[j];
        if (piece(j) % 2 == 0) x_block[piece(j) % PIECES / 2 * TN + x_row_of(j)] = block[j];
    }
}

// For each of four rows of w, add the dot product of 16 codes of this row and 16 codes of a row of x.
ivec4 add_dots(ivec4 dots, uvec4 wv[4], uvec4 xv) {
    [[unroll]] for (uint j = 0; j < 4; ++j) {
        const int v = int(xv[j]);
        dots += ivec4(dot4(int(wv[0][j]), v, 0), dot4(int(wv[1][j]), v, 0), dot4(int(wv[2][j]), v, 0),
            dot4(int(wv[3][j]), v, 0));
    }
    return dots;
}

// Scale the dot products `dots` of the group that ends with piece p, and add them to sum[c].
void add_group(uint c, ivec4 dots, uint p, uint tm, uint tn) {
    const uint at = p * 16 / GROUP * TM + tm;
    const vec2 s[4] = vec2[](w_scale[at], w_scale[at + 16], w_scale[at + 32], w_scale[at + 48]);
    const uvec2 block = x_block[p / 2 * TN + tn + c * N_THREADS];
    const vec4 scale = vec4(s[0].x, s[1].x, s[2].x, s[3].x);
    precise vec4 product = scale * vec4(dots);
    // `precise` prevents compilers from computing (dots - BIAS) * scale.
    if (FUSED != 0) product = fma(intBitsToFloat(dots), scale, -BIAS * scale);
#ifdef HAS_LOW
    const vec4 value = product + vec4(s[0].y, s[1].y, s[2].y, s[3].y) * float(group_sum(block.y, p * 16 % 32));
#else
    const vec4 value = product;
#endif
    sum[c] += uintBitsToFloat(block.x) * value;
}

// If a group has one piece, dot products are scaled immediately, because NVK would otherwise emit more moves.
// If a group has two pieces, they are scaled after the loop over rows of x, because ANV would otherwise halve
// the subgroup size.
void add_slice() {
    const uint tm = gl_LocalInvocationID.x % M_THREADS;
    const uint tn = gl_LocalInvocationID.x / M_THREADS;
    ivec4 dots[RN];
    [[unroll]] for (uint p = 0; p < PIECES; ++p) {
        uvec4 wv[4];
        [[unroll]] for (uint a = 0; a < 4; ++a) wv[a] = w_codes[(tm + a * M_THREADS) * STRIDE + p];
        [[unroll]] for (uint c = 0; c < RN; ++c) {
            const ivec4 before = p * 16 % GROUP == 0 ? ivec4(FUSED != 0 ? floatBitsToInt(BIAS) : 0) : dots[c];
            dots[c] = add_dots(before, wv, x_codes[(tn + c * N_THREADS) * STRIDE + p]);
            if (GROUP == 16) add_group(c, dots[c], p, tm, tn);
        }
        if (GROUP == 16 || p % 2 == 0) continue;
        [[unroll]] for (uint c = 0; c < RN; ++c) add_group(c, dots[c], p, tm, tn);
    }
}
