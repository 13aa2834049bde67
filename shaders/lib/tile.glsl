// The operands are copied to shared memory in slices of TK elements along k.

const uint M_THREADS = 16;
const uint N_THREADS = 8; // LOCAL is M_THREADS * N_THREADS
const uint TM = M_THREADS * RM;
const uint TN = N_THREADS * RN;
const uint TK = 128 / RM; // at most 13.3 KiB of floats per slice
const uint QM = RM / 4;
const uint W_STRIDE = TM / 4 + 1; // odd, so that transposed writes use different memory banks
const uint X_STRIDE = TN + 4; // a multiple of 4, so that a thread reads four values at once

// Return four elements of rows i..i+3 of w, one column per element. Elements after k are zeros. Rows after
// the last repeat the last row.
mat4 w_quad(uint i, uint kk, uint n, uint k) {
    mat4 rows;
    for (uint j = 0; j < 4; ++j) rows[j] = dequant4_tail(row_start(min(i + j, n - 1), k), kk, k);
    return transpose(rows);
}
