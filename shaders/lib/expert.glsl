// Locate an expert's matrix in a stack of all experts' matrices. This device has starts[e + 1] - starts[e]
// columns of expert e's FFN. If AXIS is 0 (gate, up), a column is stored as a row of `side` elements. If AXIS
// is 1 (down), a column is one element of each of `side` rows.

struct Expert {
    uint n, k; // rows, elements per row
    uint before; // columns of earlier experts in this piece
};

Expert expert_of(uint begin, uint end, uint piece_begin) {
    const uint own = end - begin;
    return Expert(AXIS == 0 ? own : side, AXIS == 0 ? side : own, begin - piece_begin);
}

uint expert_row(Expert e, uint row) {
    return AXIS == 0
        ? row_start(e.before + row, e.k)
        // each block counts as a row of ROW_UNIT elements here
        : row_start(side * (e.before / ROW_UNIT) + row * (e.k / ROW_UNIT), ROW_UNIT);
}
