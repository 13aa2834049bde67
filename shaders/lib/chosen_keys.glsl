// The keys that a row attends to: the blocks of positions in its list (index_top_k).

// Return the number of keys. The last chosen block, the row's own, may be incomplete. With `tail`, it is
// chosen only if it is incomplete.
uint n_chosen_keys(uint row, uint pos) {
    const uint in_own = tail != 0 ? (pos + 1) % block_size : pos % block_size + 1;
    return row < step_n_rows() ? min(pos + 1, (n_chosen - 1) * block_size + in_own) : 0;
}

// Return the position of key number `at` of a list.
uint chosen_position(uint list, uint at) {
    return chosen[chosen_off + list * n_chosen + at / block_size] * block_size + at % block_size;
}
