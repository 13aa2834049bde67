// Multiply a block whose K and V pass through shared memory in chunks. A chunk is read while the one before it
// is multiplied: during the last chunk of K the first of V, and during the last of V the next block's first of K.
// The including file holds the first chunk of K of its first block before the loop over blocks.

void use_k(uint cell, uint next, uint chunk) {
    barrier(); // all threads have multiplied the previous chunk
    store_k(chunk);
    barrier();
    if (chunk + 1 < K_CHUNKS) {
        hold_k(cell, chunk + 1);
    } else {
        hold_v(cell, 0);
        if (V_CHUNKS == 1) hold_k(next, 0);
    }
    score_keys(chunk);
}

void use_v(uint cell, uint next, uint chunk, uint first_valid, uint n_valid) {
    if (chunk > 0) barrier();
    store_v(chunk, first_valid, n_valid);
    barrier();
    if (chunk + 1 < V_CHUNKS) {
        hold_v(cell, chunk + 1);
    } else if (V_CHUNKS > 1) {
        hold_k(next, 0);
    }
    add_values(chunk);
}

// Compilers do not unroll a loop that contains loops.
void score_block(uint cell, uint next) {
    use_k(cell, next, 0);
    if (K_CHUNKS > 1) use_k(cell, next, 1);
    if (K_CHUNKS > 2) use_k(cell, next, 2);
    if (K_CHUNKS > 3) use_k(cell, next, 3);
    barrier();
}

void add_block(uint cell, uint next, uint first_valid, uint n_valid) {
    use_v(cell, next, 0, first_valid, n_valid);
    if (V_CHUNKS > 1) use_v(cell, next, 1, first_valid, n_valid);
    if (V_CHUNKS > 2) {
        use_v(cell, next, 2, first_valid, n_valid);
        use_v(cell, next, 3, first_valid, n_valid);
    }
}
