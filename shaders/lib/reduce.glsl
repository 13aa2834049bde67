// Sum over the workgroup as a tree in shared memory: the order is fixed, so the result is the same every run.

shared float reduce_tree[LOCAL];

// The sum of `value` over all invocations, returned to each of them. Uniform control flow only.
float reduce_sum(float value) {
    const uint lane = gl_LocalInvocationID.x;
    reduce_tree[lane] = value;
    barrier();
    for (uint s = LOCAL / 2; s > 0; s >>= 1) {
        if (lane < s) reduce_tree[lane] += reduce_tree[lane + s];
        barrier();
    }
    return reduce_tree[0];
}
