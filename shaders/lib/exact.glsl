// Functions whose results have the same bits on every driver, for values that decide a choice, such as the
// choice of experts. They use only `precise` multiplications and additions, floor and integers, because
// drivers round other functions differently. Results are a few ulp off.

// Return a * b + c, rounded after each operation.
float exact_mad(float a, float b, float c) {
    precise const float product = a * b;
    precise const float sum = product + c;
    return sum;
}

float exact_mul(float a, float b) {
    precise const float product = a * b;
    return product;
}

// Return 1 / x for 1e-37 < x < 1e37. The first approximation has an error of 12 %.
float exact_reciprocal(float x) {
    float y = uintBitsToFloat(0x7ef311c3u - floatBitsToUint(x));
    for (uint i = 0; i < 4; ++i) y = exact_mul(y, exact_mad(-x, y, 2.0));
    return y;
}

// Return 1 / sqrt(x) for x > 0, and a large number for x = 0. The first approximation has an error of 3 %.
float exact_inverse_sqrt(float x) {
    float y = uintBitsToFloat(0x5f375a86u - (floatBitsToUint(x) >> 1));
    for (uint i = 0; i < 4; ++i) y = exact_mul(y, exact_mad(exact_mul(-0.5, exact_mul(x, y)), y, 1.5));
    return y;
}

// Return e^x as 2^n e^f, for x clamped to -87..88. A Taylor series computes e^f for f within +-0.35.
float exact_exp(float x) {
    x = min(max(x, -87.0), 88.0);
    const float n = floor(exact_mad(x, 1.4426950408889634, 0.5));
    // n ln 2 is subtracted in two parts, and the first part is exact
    const float f = exact_mad(n, 2.12194440e-4, exact_mad(n, -0.693359375, x));
    float sum = exact_mad(1.0 / 5040.0, f, 1.0 / 720.0);
    sum = exact_mad(sum, f, 1.0 / 120.0);
    sum = exact_mad(sum, f, 1.0 / 24.0);
    sum = exact_mad(sum, f, 1.0 / 6.0);
    sum = exact_mad(sum, f, 0.5);
    sum = exact_mad(sum, f, 1.0);
    sum = exact_mad(sum, f, 1.0);
    return exact_mul(sum, uintBitsToFloat(uint(int(n) + 127) << 23));
}

// Return ln(1 + t) for 0 <= t <= 1 as 2 artanh(t / (2 + t)), by its series.
float exact_log1p(float t) {
    const float s = exact_mul(t, exact_reciprocal(exact_mad(1.0, t, 2.0)));
    const float square = exact_mul(s, s);
    float sum = 1.0 / 17.0;
    sum = exact_mad(sum, square, 1.0 / 15.0);
    sum = exact_mad(sum, square, 1.0 / 13.0);
    sum = exact_mad(sum, square, 1.0 / 11.0);
    sum = exact_mad(sum, square, 1.0 / 9.0);
    sum = exact_mad(sum, square, 1.0 / 7.0);
    sum = exact_mad(sum, square, 1.0 / 5.0);
    sum = exact_mad(sum, square, 1.0 / 3.0);
    return exact_mul(exact_mul(2.0, s), exact_mad(sum, square, 1.0));
}

// Return sqrt(ln(1 + e^x)), but at least 1e-19.
float exact_root_softplus(float x) {
    const float y = exact_mad(1.0, max(x, 0.0), exact_log1p(exact_exp(x > 0.0 ? -x : x)));
    return exact_mul(y, exact_inverse_sqrt(y));
}

// Return 1 / (1 + e^-x), but at least 2e-35.
float exact_sigmoid(float x) { return exact_reciprocal(exact_mad(1.0, exact_exp(min(-x, 80.0)), 1.0)); }
