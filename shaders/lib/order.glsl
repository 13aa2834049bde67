// Return an unsigned key. Keys have the same order as the values. Both zeros have the same key. NaN has the
// largest key, and no value has key 0.
uint order_key(float value) {
    const uint bits = floatBitsToUint(value);
    const uint mag = bits & 0x7fffffffu;
    if (mag > 0x7f800000u) return 0xffffffffu;
    if (mag == 0u) return 0x80000000u;
    return bits == mag ? bits | 0x80000000u : ~bits;
}
