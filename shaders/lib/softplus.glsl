// softplus(x) = log(1 + e^x), without cancellation or overflow.

// Return log(1 + e), exact even if 1 + e loses most bits of e.
float log1p(float e) {
    precise const float u = 1.0 + e;
    precise const float rest = u - 1.0;
    return rest == 0.0 ? e : log(u) * (e / rest);
}

float softplus(float x) { return max(x, 0.0) + log1p(exp(-abs(x))); }
