// The elements of a row that a thread takes: FIRST * lane + u * NEXT for u < EACH, then EACH * LOCAL further on.
// Floats: neighbours take neighbours. OUT_Q8: four in a row (lib/quantize.glsl). The including file declares BATCH
// and y.
#ifdef OUT_Q8
#define Q8_QUADS 2
#include "lib/quantize.glsl"
const uint EACH = 4, FIRST = 4, NEXT = 1;
#else
const uint EACH = BATCH, FIRST = 1, NEXT = LOCAL;
#endif
