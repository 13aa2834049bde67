// The workgroup processes EACH * LOCAL elements of the row at a time. Of these, a thread processes the
// elements FIRST * lane + u * NEXT for u < EACH. Neighbouring threads process neighbouring floats. If OUT_Q8
// is set, a thread processes four consecutive elements (lib/quantize.glsl).
#ifdef OUT_Q8
#define Q8_QUADS 2
#include "lib/quantize.glsl"
const uint EACH = 4, FIRST = 4, NEXT = 1;
#else
const uint EACH = BATCH, FIRST = 1, NEXT = LOCAL;
#endif
