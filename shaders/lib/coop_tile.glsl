// A tile of a product on matrix units and its slices in shared memory. The including file declares M, N, of the device's
// matrices, FM x FN of them for a subgroup, SM x SN subgroups, and includes lib/coop.glsl.

const uint TM = M * FM * SM; // rows of w in a tile
const uint TN = N * FN * SN; // rows of x
const uint TK = 32; // elements of k in a slice
const uint STRIDE = TK / 4 + 2; // in QUADs: rows 80 bytes apart, eight of which begin at different banks

shared QUAD w_tile[TM * STRIDE]; // [row of w][k]
shared QUAD x_tile[TN * STRIDE]; // [row of x][k]
shared float results[SM * SN * M * N]; // a matrix of each subgroup, by columns: [row of x][row of w]
