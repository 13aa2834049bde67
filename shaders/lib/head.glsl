// RMS norm of a head.

float inverse_rms = 1.0;

// Compute `inverse_rms` of the head of x at word `base`. All threads of the workgroup must call this
// function.
void measure(uint base) {
    float sum = 0.0;
    for (uint i = gl_LocalInvocationID.x; i < head_dim; i += LOCAL) {
        const float value = x[base + i];
        sum += value * value;
    }
    inverse_rms = 1.0 / sqrt(reduce_sum(sum) / float(head_dim) + eps);
}

float normed(uint base, uint i) {
    float value = x[base + i];
    if (NORM != 0) value *= inverse_rms;
    if (NORM == 2) value *= w[w_off + i];
    return value;
}
