// A sum over the workgroup in a fixed order.

// Calls of reduce_sum alternate between two arrays, because other threads may still read the previous result.
shared float reduce_tree[2 * LOCAL];
uint reduce_at = 0;

// Return the sum of `value` over the workgroup. All threads must call this function. More than 32 threads add
// in two steps, in which a thread reads many values, because a tree would need a barrier per level.
float reduce_sum(float value) {
    const uint thread = gl_LocalInvocationID.x;
    const uint root = reduce_at;
    reduce_at = LOCAL - root;
    reduce_tree[root + thread] = value;
    barrier();
    for (uint s = LOCAL / 2; LOCAL <= 32 && s > 0; s >>= 1) {
        if (thread < s) reduce_tree[root + thread] += reduce_tree[root + thread + s];
        barrier();
    }
    if (LOCAL <= 32) return reduce_tree[root];

    if (thread < 32) {
        float sum = 0.0;
        [[unroll]] for (uint i = thread; i < LOCAL; i += 32) sum += reduce_tree[root + i];
        reduce_tree[root + thread] = sum;
    }
    barrier();
    vec4 sums = vec4(0.0);
    [[unroll]] for (uint i = 0; i < 32; i += 4) {
        [[unroll]] for (uint c = 0; c < 4; ++c) sums[c] += reduce_tree[root + i + c];
    }
    return (sums.x + sums.y) + (sums.z + sums.w);
}
