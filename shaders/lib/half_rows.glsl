// A row of k halves as pack_f16 writes it: pairs in words, zeros up to a multiple of 32 elements, then the bits of its
// scale and three words of zero. So every row and every slice of 32 elements begins at a multiple of 16 bytes.

uint half_words(uint k) { return (k + 31u) / 32u * 16u; }

uint half_row_words(uint k) { return half_words(k) + 4u; }
