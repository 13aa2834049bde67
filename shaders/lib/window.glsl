// The keys that a row attends to: in its last `window` positions, in its chunk of `chunk` positions, and from
// position FIRST_KEY on. Zero means no limit.
#ifndef FIRST_KEY
#define FIRST_KEY 0u
#endif

uint first_key_of(uint n_keys) {
    uint first_key = window > 0 && n_keys > window ? n_keys - window : 0;
    if (chunk > 0 && n_keys > 0) first_key = max(first_key, (n_keys - 1) / chunk * chunk);
    return max(first_key, FIRST_KEY);
}

bool in_window(uint key_pos, uint n_keys) {
    return key_pos >= FIRST_KEY && (window == 0 || key_pos + window >= n_keys);
}

// Return whether two rows with these first keys read the same blocks and attend to the same chunk. First keys
// of two chunks may be in the same block.
bool begin_together(uint first_key, uint other_first_key) {
    return (first_key ^ other_first_key) < (chunk > 0 ? 1 : CELL_BLOCK);
}
