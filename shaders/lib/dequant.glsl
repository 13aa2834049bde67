// Weights of every format as floats. The including file declares `uint w[]`, calls it with the row's start, and never
// unpacks bits itself. A new format is one block description and one function.
//
//     uint row_start(uint row, uint n)      where a row of n elements starts, in the format's own unit
//     ROW_UNIT                              elements that rows are whole multiples of
//     vec4 dequant4(uint start, uint k)     elements k..k+3 of a row, k a multiple of 4 (quantized formats: in a block)
//     vec4 dequant4_tail(start, k, n)       the same with zeros from element n on
//
// Rows are addressed in halves (2 bytes), the finest alignment a GGUF row can have inside a view (a Q8_0 block has 34
// bytes), which reaches 8 GiB with 32 bits; f32 in words.

#if !defined(TYPE_F32)
// 32 bits from half h on. Never reads a word that holds none of them, so the end of a view is safe.
uint word_at(uint h) {
    const uint low = w[h >> 1];
    const uint high = w[(h + 1) >> 1];
    return (h & 1u) == 0u ? low : (low >> 16) | (high << 16);
}

float half_at(uint h) {
    const vec2 pair = unpackHalf2x16(w[h >> 1]);
    return (h & 1u) == 0u ? pair.x : pair.y;
}
#endif

#if defined(TYPE_F32)
const uint ROW_UNIT = 1;

uint row_start(uint row, uint n) { return w_off + row * n; }

float dequant1(uint start, uint k) { return uintBitsToFloat(w[start + k]); }

vec4 dequant4(uint start, uint k) {
    const uint i = start + k;
    return uintBitsToFloat(uvec4(w[i], w[i + 1], w[i + 2], w[i + 3]));
}
#define HAS_TAIL // rows need not be a multiple of 4 long

#elif defined(TYPE_F16)
const uint ROW_UNIT = 1;

uint row_start(uint row, uint n) { return 2 * w_off + row * n; }

float dequant1(uint start, uint k) { return half_at(start + k); }

vec4 dequant4(uint start, uint k) {
    const uint h = start + k;
    return vec4(unpackHalf2x16(word_at(h)), unpackHalf2x16(word_at(h + 2)));
}
#define HAS_TAIL

#elif defined(TYPE_Q8_0)
// block of 32: half d; int8 q[32]                      value = d * q
const uint ROW_UNIT = 32;
const uint BLOCK_HALVES = 17;

uint row_start(uint row, uint n) { return 2 * w_off + row * (n / 32) * BLOCK_HALVES; }

vec4 dequant4(uint start, uint k) {
    const uint block = start + (k >> 5) * BLOCK_HALVES;
    const int q = int(word_at(block + 1 + ((k & 31u) >> 1)));
    const ivec4 bytes = ivec4(q << 24, q << 16, q << 8, q) >> 24;
    return half_at(block) * vec4(bytes);
}

#elif defined(TYPE_Q4_0)
// block of 32: half d; 16 bytes, byte j holds element j low and element j + 16 high      value = d * (q - 8)
const uint ROW_UNIT = 32;
const uint BLOCK_HALVES = 9;

uint row_start(uint row, uint n) { return 2 * w_off + row * (n / 32) * BLOCK_HALVES; }

vec4 dequant4(uint start, uint k) {
    const uint block = start + (k >> 5) * BLOCK_HALVES;
    const uint q = word_at(block + 1 + ((k & 15u) >> 1)) >> ((k & 16u) >> 2);
    const uvec4 nibbles = uvec4(q, q >> 8, q >> 16, q >> 24) & 15u;
    return half_at(block) * (vec4(nibbles) - 8.0);
}
#endif

#ifdef HAS_TAIL
vec4 dequant4_tail(uint start, uint k, uint n) {
    if (k + 4 <= n) return dequant4(start, k);
    vec4 value = vec4(0.0);
    for (uint i = 0; i < 3; ++i) {
        if (k + i < n) value[i] = dequant1(start, k + i);
    }
    return value;
}
#else
vec4 dequant4_tail(uint start, uint k, uint n) { return k < n ? dequant4(start, k) : vec4(0.0); }
#endif
