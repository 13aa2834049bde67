// A thread takes elements FIRST * lane + u * NEXT of a row for u < EACH, then continues EACH * LOCAL elements
// later. For floats, neighbouring threads take neighbouring elements; with OUT_Q8 a thread takes four
// consecutive elements (lib/quantize.glsl).
#ifdef OUT_Q8
#define Q8_QUADS 2
#include "lib/quantize.glsl"
const uint EACH = 4, FIRST = 4, NEXT = 1;
#else
const uint EACH = BATCH, FIRST = 1, NEXT = LOCAL;
#endif
