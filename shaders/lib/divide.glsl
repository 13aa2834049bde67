// Return a / b rounded to nearest, ties to even. The arguments and the quotient must be positive normal
// numbers. All devices must store the same caches, but a driver's division may be 2.5 ulp off.
float divide(float a, float b) {
    const uint a_bits = floatBitsToUint(a);
    const uint b_bits = floatBitsToUint(b);
    const uint divisor = (b_bits & 0x7fffffu) | 0x800000u;
    uint rest = (a_bits & 0x7fffffu) | 0x800000u;
    const bool below = rest < divisor; // quotient in [1/2, 1)
    const uint exponent = (a_bits >> 23) - (b_bits >> 23) + 127u - (below ? 1u : 0u);
    if (below) rest <<= 1;
    uint quotient = 0u;
    for (uint i = 0; i < 25; ++i) { // 24 bits of the significand and one for rounding
        quotient <<= 1;
        if (rest >= divisor) {
            rest -= divisor;
            quotient |= 1u;
        }
        rest <<= 1;
    }
    const uint up = (quotient & 1u) & ((rest != 0u || (quotient & 2u) != 0u) ? 1u : 0u);
    return uintBitsToFloat((exponent << 23) + ((quotient >> 1) & 0x7fffffu) + up);
}
