// The matrix of an expert in a stack, and which pairs of row and used expert meet it. An expert holds the columns
// starts[e]..starts[e + 1] of its feed-forward network: that many rows of `side` elements with AXIS 0 (gate, up), `side`
// rows of that many elements with AXIS 1 (down). The including file declares AXIS and includes lib/dequant.glsl.

struct Expert {
    uint n, k; // rows and elements in a row
    uint before; // columns in front of it in this piece of the stack
};

Expert expert_of(uint begin, uint end, uint piece_begin) {
    const uint own = end - begin;
    return Expert(AXIS == 0 ? own : side, AXIS == 0 ? side : own, begin - piece_begin);
}

uint expert_row(Expert e, uint row) {
    return AXIS == 0
        ? row_start(e.before + row, e.k)
        : row_start(side * (e.before / ROW_UNIT) + row * (e.k / ROW_UNIT), ROW_UNIT); // a row of rows this long
}
