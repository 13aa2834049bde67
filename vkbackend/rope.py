"""RoPE tables. The host computes cos and sin in float64, because a driver's functions may have an error of
1e-4."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vkbackend.errors import InvalidArgument

SCALINGS = ("none", "linear", "yarn")
MAX_SECTIONS = 1 << 30  # The counts in a damaged file may exceed an int64.


@dataclass(frozen=True, slots=True)
class RopeTable:
    """The angles theta_i(pos) = pos * freq_base^(-2i / n_rot) / freq_factors[i] and their scaling.

    `linear` scaling divides theta by `factor`. `yarn` (Peng et al. 2023, arXiv:2309.00071) divides theta only
    for pairs that make fewer than `beta_slow` turns in `orig_ctx` positions. YaRN does not change pairs with
    more than `beta_fast` turns, and interpolates between these limits. YaRN also multiplies cos and sin by 1
    + 0.1 ln(factor).

    Cos and sin are multiplied by `attn_factor`. A `temperature` t multiplies cos and sin at position p by 1 +
    t ln(1 + floor((p + temperature_offset) / temperature_length)), so rotating q also scales q.

    `sections` divides the pairs among the four components of a multimodal position: time, height, width and
    an unused one (Wang et al. 2024, arXiv:2409.12191). The pairs of a component are contiguous or
    `interleaved`. For text, time, height and width equal the token's position. The fourth component is 0, so
    its contiguous pairs do not rotate. Raises InvalidArgument for bad values.
    """

    n_rot: int
    freq_base: float = 10_000.0
    freq_factors: Sequence[float] | np.ndarray | None = None
    scaling: str = "none"
    factor: float = 1.0
    orig_ctx: int = 0
    attn_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    ext_factor: float = 1.0  # YaRN's weight of the unscaled angle, for pairs above `beta_fast`
    temperature: float = 0.0
    temperature_length: int = 1
    temperature_offset: int = 0
    sections: tuple[int, ...] = ()
    interleaved: bool = False
    shift: int = 0  # subtracted from each position
    skipped: int = 0  # the first dimensions of n_rot do not turn; the formula counts only the others

    def __post_init__(self) -> None:
        if self.n_rot < 2 or self.n_rot % 2:
            raise InvalidArgument(f"RoPE rotates pairs: n_rot must be even and at least 2, got {self.n_rot}")
        if not 0 <= self.skipped <= self.n_rot - 2 or self.skipped % 2 or (self.skipped and self.sections):
            raise InvalidArgument(
                f"RoPE skips an even number of dimensions, less than {self.n_rot}, and has no sections then; "
                f"got {self.skipped}"
            )
        if not (math.isfinite(self.freq_base) and self.freq_base > 0):
            raise InvalidArgument(f"RoPE frequency base must be positive, got {self.freq_base}")
        if self.scaling not in SCALINGS:
            raise InvalidArgument(f"RoPE scaling {self.scaling!r} is not one of {', '.join(SCALINGS)}")
        if self.scaling != "none" and not (math.isfinite(self.factor) and self.factor > 0):
            raise InvalidArgument(f"RoPE scaling factor must be positive, got {self.factor}")
        if self.scaling == "yarn" and (self.orig_ctx <= 0 or self.freq_base <= 1):
            raise InvalidArgument(
                "YaRN needs the original context length and a frequency base above 1, got "
                f"{self.orig_ctx} and {self.freq_base}"
            )
        if self.scaling == "yarn" and not min(self.beta_fast, self.beta_slow) > 0:
            raise InvalidArgument(
                f"YaRN's beta_fast and beta_slow must be positive, got {self.beta_fast} and {self.beta_slow}"
            )
        if self.temperature_length <= 0 or not math.isfinite(self.temperature):
            raise InvalidArgument(
                f"RoPE temperature {self.temperature} over {self.temperature_length} positions: the first "
                "must be finite, the second positive"
            )
        if self.sections and (len(self.sections) != 4 or min(self.sections) < 0 or not any(self.sections)):
            raise InvalidArgument(f"RoPE sections must be four counts, not all 0, got {self.sections}")
        if sum(self.sections) > MAX_SECTIONS:
            raise InvalidArgument(f"RoPE sections must add up to at most {MAX_SECTIONS}, got {self.sections}")
        if self.freq_factors is not None:
            factors = np.asarray(self.freq_factors, np.float64)
            if factors.shape != (self._n // 2,) or not np.all(np.isfinite(factors) & (factors != 0)):
                raise InvalidArgument(
                    f"RoPE needs {self._n // 2} finite, non-zero factors, got shape {factors.shape}"
                )

    @property
    def frequencies(self) -> np.ndarray:
        """Return each pair's radians per position, float64 [n_rot / 2]."""
        return np.r_[np.zeros(self.skipped // 2), self._turning()]

    @property
    def _n(self) -> int:
        return self.n_rot - self.skipped

    def _turning(self) -> np.ndarray:
        theta = self.freq_base ** (-2.0 * np.arange(self._n // 2) / self._n) * self._turns
        if self.freq_factors is not None:
            theta = theta / np.asarray(self.freq_factors, np.float64)
        if self.scaling == "none":
            return theta
        scaled = theta / self.factor
        if self.scaling == "linear":
            return scaled
        low = max(0.0, math.floor(self._pair_turning(self.beta_fast)))
        high = min(self._n - 1.0, math.ceil(self._pair_turning(self.beta_slow)))
        ramp = np.clip((np.arange(self._n // 2) - low) / max(0.001, high - low), 0.0, 1.0)
        mix = (1.0 - ramp) * self.ext_factor
        return scaled * (1.0 - mix) + theta * mix

    @property
    def is_multimodal(self) -> bool:
        """Return whether pairs turn by the height or width of a multimodal position."""
        return any(self.sections[1:3])

    @property
    def _turns(self) -> np.ndarray:
        """Return whether each pair belongs to time, height or width, bool [n_rot / 2]."""
        return self._components < 3

    @property
    def _components(self) -> np.ndarray:
        """Return each pair's component of a multimodal position, 0 to 3, int64 [n_rot / 2]."""
        if not self.sections:
            return np.zeros(self._n // 2, np.int64)
        time, height, width, _ = self.sections
        pair = np.arange(self.n_rot // 2)
        if self.interleaved:
            # As in transformers, the reference of these models, all other pairs turn by time. In contrast,
            # llama.cpp does not rotate pairs 61 and 62 of Qwen3-VL's sections [24, 20, 20].
            return np.where(pair < 3 * np.array([0, height, width])[pair % 3], pair % 3, 0)
        sector = pair % sum(self.sections)
        return np.searchsorted(np.cumsum([time, height, width]), sector, side="right")

    @property
    def magnitude(self) -> float:
        grown = self.scaling == "yarn" and self.ext_factor != 0.0
        return self.attn_factor * (1.0 + 0.1 * math.log(self.factor) if grown else 1.0)

    def _pair_turning(self, rotations: float) -> float:
        """Return the fractional index of the pair that makes `rotations` turns in `orig_ctx` positions."""
        return self._n * math.log(self.orig_ctx / (rotations * 2 * math.pi)) / (2 * math.log(self.freq_base))

    def rotation(self, distance: int) -> np.ndarray:
        """Return cos and sin that rotate a key of position p to position p + `distance`, float32 [n_rot / 2,
        2]. The rotation does not scale, because the key is already scaled."""
        angles = distance * self.frequencies
        return np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)

    def rows(self, positions: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return cos and sin at each position, float32 [n_positions, n_rot / 2, 2]. A position is a number,
        or has the components time, height and width."""
        at = np.asarray(positions, np.float64) - self.shift
        if at.ndim == 2:
            angles = at[:, np.minimum(self._components, 2)] * self.frequencies
            at = at[:, :1]
        else:
            at = at[:, None]
            angles = at * self.frequencies
        size = np.full(at.shape, self.magnitude)
        if self.temperature:
            lengths = (at + self.temperature_offset) // self.temperature_length
            size *= 1.0 + self.temperature * np.log1p(lengths)
        return (np.stack([np.cos(angles), np.sin(angles)], axis=-1) * size[..., None]).astype(np.float32)
