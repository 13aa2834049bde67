// A row of pack_f16 consists of k F16 values, padded with zeros to a multiple of 32, then the scale as a
// float, then three zero words. So every slice of 32 elements is aligned to 16 bytes.

uint half_words(uint k) { return (k + 31u) / 32u * 16u; }

uint half_row_words(uint k) { return half_words(k) + 4u; }
