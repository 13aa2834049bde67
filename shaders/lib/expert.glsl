// Finds the matrix of an expert in a stack. This device has starts[e + 1] - starts[e] columns of expert e's
// FFN. With AXIS 0 (gate, up) each column is a row of `side` elements, with AXIS 1 (down) one element of each
// of `side` rows.

struct Expert {
    uint n, k; // rows, elements per row
    uint before; // columns of earlier experts in this piece of the stack
};

Expert expert_of(uint begin, uint end, uint piece_begin) {
    const uint own = end - begin;
    return Expert(AXIS == 0 ? own : side, AXIS == 0 ? side : own, begin - piece_begin);
}

uint expert_row(Expert e, uint row) {
    return AXIS == 0
        ? row_start(e.before + row, e.k)
        // counted in blocks, as if each block were a row of ROW_UNIT elements
        : row_start(side * (e.before / ROW_UNIT) + row * (e.k / ROW_UNIT), ROW_UNIT);
}
