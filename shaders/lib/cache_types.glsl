// A cache type's number is its index in CACHE_TYPES of vkbackend/ops/kv_cache.py. Quantized blocks have 32
// elements and GGML's layouts: f16 d, f16 m (Q4_1, Q5_1), u32 h (Q5_0, Q5_1), then the codes. Q8_0 has int8
// codes. The other types have 16 bytes of nibbles: low nibbles are elements 0..15, and high nibbles are
// elements 16..31. Bit i of h is the fifth bit of element i. From its code q, an element is
// Q8_0: d * q     Q4_0: d * (q - 8)     Q5_0: d * (q - 16)     Q4_1, Q5_1: d * q + m     IQ4_NL: d * iq4_values(q)

const uint CACHE_F32 = 0, CACHE_F16 = 1, CACHE_BF16 = 2, CACHE_Q8_0 = 3, CACHE_Q4_0 = 4;
const uint CACHE_Q4_1 = 5, CACHE_Q5_0 = 6, CACHE_Q5_1 = 7, CACHE_IQ4_NL = 8;
const uint BLOCK = 32;
const uint Q8_0_HALVES = 17;

bool has_minimum(uint type) { return type == CACHE_Q4_1 || type == CACHE_Q5_1; }

bool has_fifth_bits(uint type) { return type == CACHE_Q5_0 || type == CACHE_Q5_1; }

// Return the 16-bit units before a block's codes.
uint head_halves(uint type) { return (has_minimum(type) ? 2u : 1u) + (has_fifth_bits(type) ? 2u : 0u); }

uint halves_of(uint type) { return head_halves(type) + (type == CACHE_Q8_0 ? 16u : 8u); }
