#version 450
#extension GL_GOOGLE_include_directive : require
// Hash the n-grams that end at each row (vkbackend/ops/streams.py). An n-gram's hash is the exclusive or of
// token * factor, in 64 bits. For head h, the id is hash % size[h] + offset[h]. `table` has a pair of words
// (low, high) per factor, then the sizes, then the offsets.
#include "lib/types.glsl"

layout(constant_id = 1) const uint LONGEST = 3; // tokens of the longest n-gram

layout(push_constant) uniform Push {
    uint x_off, table_off, ids_off;
    uint n_rows, n_heads, end;
};
layout(set = 0, binding = 0) readonly buffer X { float x[]; };
layout(set = 0, binding = 1) readonly buffer Table { uint table[]; };
layout(set = 0, binding = 2) writeonly buffer Ids { uint ids[]; };

void main() {
    const uint index = global_index();
    if (index >= n_rows * n_heads) return;
    const uint row = index / n_heads;
    const uint head = index % n_heads;
    const uint n = 2 + head / (n_heads / (LONGEST - 1));
    uint low = 0, high = 0;
    bool ended = false;
    for (uint k = 0; k < n; ++k) {
        const int distance = int(x[x_off + row * LONGEST + k]);
        ended = ended || (k > 0 && distance == 0);
        const uint token = ended ? end : uint(int(end) + distance);
        const uint factor_low = table[table_off + 2 * k];
        uint carry, product;
        umulExtended(token, factor_low, carry, product);
        low ^= product;
        high ^= token * table[table_off + 2 * k + 1] + carry;
    }
    const uint size = table[table_off + 2 * LONGEST + head];
    uint rest = 0; // below 2^31
    for (uint bit = 64; bit-- > 0;) {
        rest = rest << 1 | ((bit < 32 ? low >> bit : high >> (bit - 32)) & 1u);
        if (rest >= size) rest -= size;
    }
    ids[ids_off + index] = rest + table[table_off + 2 * LONGEST + n_heads + head];
}
