// Sum over the workgroup as a tree in shared memory: the order is fixed, so the result is the same every run.

// Two trees in turn: a call may write its own while others still read the last one's result, and barriers of the call
// between lie before the third, which takes the first again.
shared float reduce_tree[2 * LOCAL];
uint reduce_at = 0;

// The sum of `value` over all invocations, returned to each of them. Uniform control flow only.
float reduce_sum(float value) {
    const uint root = reduce_at;
    const uint lane = root + gl_LocalInvocationID.x;
    reduce_at = LOCAL - root;
    reduce_tree[lane] = value;
    barrier();
    for (uint s = LOCAL / 2; s > 0; s >>= 1) {
        if (gl_LocalInvocationID.x < s) reduce_tree[lane] += reduce_tree[lane + s];
        barrier();
    }
    return reduce_tree[root];
}
