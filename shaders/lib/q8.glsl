// The layout of 8-bit activations (quantize_q8). A row of k elements begins with k / 4 words of four int8.
// Then each block of 32 has two words: the scale as a float, and the sums of the first and last 16 codes as
// two int16.

uint q8_row_words(uint k) { return k / 32 * 10; }

uint q8_block(uint k, uint i) { return k / 4 + i / 32 * 2; }

// Return the sum of the 16 codes that begin at element i.
int q8_sum16(uint sums, uint i) { return int(sums << (16 - (i & 16u))) >> 16; }

int q8_sum32(uint sums) { return q8_sum16(sums, 0) + q8_sum16(sums, 16); }

// The scale is max |x| / 127. `top` holds the bits of max |x|, where NaN counts as larger than inf. If a
// block contains NaN or inf, its scale is NaN. If max |x| is below 2.4e-35, the scale is 0, because
// exact_reciprocal would fail.
bool q8_usable(uint top) { return top >= 0x06000000u && top < 0x7f800000u; }

uint q8_scale(uint top, float d) { return top >= 0x7f800000u ? 0x7fc00000u : q8_usable(top) ? floatBitsToUint(d) : 0u; }
