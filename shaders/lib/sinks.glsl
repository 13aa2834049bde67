// An attention sink is a logit of a head that is added only to the softmax's denominator.

// Return the factor that normalises a sum of exp(score - m) * v. `m` is the maximum score, and `sum` is the
// sum of exp(score - m).
float inverse_sum(float m, float sum, uint head) {
    if (HAS_SINKS == 0) return 1.0 / sum;
    const float sink = sinks[sinks_off + head];
    const float m_all = max(m, sink);
    return exp(m - m_all) / (sum * exp(m - m_all) + exp(sink - m_all));
}
