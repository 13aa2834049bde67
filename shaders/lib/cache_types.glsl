// A cache type's number is its index in CACHE_TYPES of vkbackend/ops/kv_cache.py. Quantized blocks have 32
// elements.

const uint CACHE_F32 = 0, CACHE_F16 = 1, CACHE_BF16 = 2, CACHE_Q8_0 = 3, CACHE_Q4_0 = 4;
const uint BLOCK = 32;
const uint Q8_0_HALVES = 17; // A block is f16 d, int8 q[32]. An element is d * q.
// A block is f16 d, u8[16]. Low nibbles are elements 0..15, and high nibbles are elements 16..31. An element
// is d * (q - 8).
const uint Q4_0_HALVES = 9;

uint halves_of(uint type) { return type == CACHE_Q8_0 ? Q8_0_HALVES : Q4_0_HALVES; }
