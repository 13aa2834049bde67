"""Two oracles of the gated delta rule for one head in float64 numpy. `recurrent` computes token by token, and
`solved` solves one system for all tokens. The definition is S_t = diag(a_t) S_t-1 + k_t u_t^T, u_t = beta_t
(v_t - the value of k_t), y_t = S_t^T q_t / sqrt(size). States are [keys, values].
"""

from __future__ import annotations

import numpy as np


def recurrent(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, g: np.ndarray, beta: np.ndarray, state: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return y and the final state. q and k are [n, size], v is [n, values], beta is [n], and g is the log of
    the decay, [n, 1 or size]."""
    s, y = state.astype(np.float64), np.empty(v.shape)
    for t in range(len(v)):
        s = s * np.exp(g[t].astype(np.float64))[:, None]
        u = beta[t] * (v[t] - k[t] @ s)
        s = s + np.outer(k[t], u)
        y[t] = q[t] @ s / np.sqrt(q.shape[1])
    return y, s


def solved(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, g: np.ndarray, beta: np.ndarray, state: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the same values as `recurrent`, computed from one triangular system for all u."""
    (n, size), sums = k.shape, np.broadcast_to(g, k.shape).astype(np.float64).cumsum(0)
    kept = np.exp(sums)  # The decay of the initial state up to each token.
    since = np.exp(np.minimum(sums[:, None] - sums, 0.0))  # The decay from row s to row t, [t, s, keys].
    keys, queries = (np.tril(np.einsum("ti,si,tsi->ts", x, k, since)) for x in (k, q))
    unseen = beta[:, None] * (v - (k * kept) @ state)
    u = np.linalg.solve(np.eye(n) + beta[:, None] * np.tril(keys, -1), unseen)
    y = ((q * kept) @ state + queries @ u) / np.sqrt(size)
    return y, kept[-1][:, None] * state + (since[-1] * k).T @ u
