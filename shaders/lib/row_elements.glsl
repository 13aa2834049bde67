// Which elements of a row a thread takes: FIRST * lane + u * NEXT for u < EACH, then the same EACH * LOCAL further on.
// For floats, neighbouring threads take neighbouring elements. For 8 bits (OUT_Q8), a thread takes four in a row, as
// lib/quantize.glsl packs them.
// The including file declares BATCH and y.
#ifdef OUT_Q8
#define Q8_QUADS 2
#include "lib/quantize.glsl"
const uint EACH = 4, FIRST = 4, NEXT = 1;
#else
const uint EACH = BATCH, FIRST = 1, NEXT = LOCAL;
#endif
