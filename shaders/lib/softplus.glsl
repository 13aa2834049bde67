// softplus(x) = log(1 + e^x), without cancellation or overflow.

// Return log(1 + e) for e in [0, 1] as 2 artanh(e / (2 + e)), by a series with a relative error of at most
// 2.2e-7. The built-in log is not used, because Vulkan allows an absolute error of 2^-21 near 1. On an H100,
// log(u) * e / (u - 1) with u = 1 + e was wrong by 1 % for small e.
float log1p(float e) {
    const float s = e / (2.0 + e), t = s * s;
    const float tail = 1.0 / 7.0 + t * (1.0 / 9.0 + t * (1.0 / 11.0 + t * (1.0 / 13.0 + t * (1.0 / 15.0))));
    return 2.0 * s * (1.0 + t * (1.0 / 3.0 + t * (1.0 / 5.0 + t * tail)));
}

float softplus(float x) { return max(x, 0.0) + log1p(exp(-abs(x))); }
