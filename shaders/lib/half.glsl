// Round a float to the nearest F16, ties to even. An overflow becomes inf. All devices must store the same
// caches, but the rounding of packHalf2x16 depends on the driver.
uint half_bits(float value) {
    const uint bits = floatBitsToUint(value);
    const uint sign = (bits >> 16) & 0x8000u;
    const uint mag = bits & 0x7fffffffu;
    if (mag > 0x7f800000u) return sign | 0x7e00u; // NaN
    if (mag >= 0x477ff000u) return sign | 0x7c00u; // 65,520 and above
    if (mag >= 0x38800000u) { // normal: rebias by 127 - 15, drop 13 bits
        return sign | ((mag - 0x38000000u + 0xfffu + ((mag >> 13) & 1u)) >> 13);
    }
    if (mag < 0x33000000u) return sign; // below half of the smallest subnormal
    const uint shift = 126u - (mag >> 23); // drops 14..24 of the 24 bits
    const uint significand = (mag & 0x7fffffu) | 0x800000u;
    const uint kept = significand >> shift;
    const uint rest = significand & ((1u << shift) - 1u);
    const uint tie = 1u << (shift - 1u);
    return sign | (kept + ((rest > tie || (rest == tie && (kept & 1u) != 0u)) ? 1u : 0u));
}
