// Some drivers' built-in tanh loses bits near 0, or returns inf beyond 88.

float tanh_safe(float x) {
    const float a = abs(x);
    if (a < 1.0) { // Lambert's continued fraction, with an error of 2e-9 at 1
        const float s = x * x;
        return x * (135135.0 + s * (17325.0 + s * (378.0 + s))) / (135135.0 + s * (62370.0 + s * (3150.0 + s * 28.0)));
    }
    const float e = exp(-2.0 * a);
    return sign(x) * (1.0 - e) / (1.0 + e);
}

// Limit x smoothly to +-c, or not at all if c = 0.
float soft_cap(float x, float c) { return c > 0.0 ? c * tanh_safe(x / c) : x; }
