"""Find the largest micro-batch that trains in few trials: jump to where a line through the peaks meets the limit.

[Note: the jump]
Peak memory is nearly fixed + per_sample x size. Two trials give the line, the line gives the largest size within the
limit, and that size is confirmed by running it. Where the line is wrong (a trial ran out of memory below it, peaks that
do not grow), the search halves the interval that is left, so that it always ends. A trial that ran, but with a peak
above the allowed bytes, counts as one that does not fit, and its peak makes the line better.
"""

from __future__ import annotations

MOST_GROWTH = 8
"""A trial is at most so many times as large as the largest that fitted: lines drawn far ahead are bad, and costly."""


class LargestSearch:
    """The trials so far, and what to try next.

        while (size := search.next_size()) is not None:
            search.record(size, peak_bytes or None)
        search.largest

    Args:
        allowed_bytes: most that a trial's peak may be. None: only running out of memory ends the search.
        largest_wanted: never try more.
    """

    def __init__(self, allowed_bytes: int | None, largest_wanted: int):
        self.allowed_bytes = allowed_bytes
        self.largest_wanted = largest_wanted
        self.smallest_failed: int | None = None
        self.peaks: dict[int, int] = {}
        """Peak bytes of every trial that ran, also of those above ``allowed_bytes``."""

        self._fitted: set[int] = set()

    @property
    def largest(self) -> int:
        """The largest size that fitted; 0: none so far."""
        return max(self._fitted, default=0)

    def record(self, size: int, peak_bytes: int | None) -> None:
        """Take note of a trial; ``peak_bytes`` None: it ran out of memory, whatever was recorded of it before."""
        if peak_bytes is not None:
            self.peaks[size] = peak_bytes
            if self.allowed_bytes is None or peak_bytes <= self.allowed_bytes:
                self._fitted.add(size)
                return
        self._fitted = {other for other in self._fitted if other < size}
        self.smallest_failed = size if self.smallest_failed is None else min(size, self.smallest_failed)

    def accept(self, size: int) -> None:
        """Take note that a size fits, whose peak was not measured."""
        self._fitted.add(size)

    def leaves_half_free(self, size: int) -> bool:
        """Return whether the peaks so far say that a size needs no more than half of ``allowed_bytes``."""
        line = self._line()
        if self.allowed_bytes is None or line is None:
            return False
        known_size, known_peak, per_sample = line
        return known_peak + max(0.0, per_sample) * (size - known_size) <= self.allowed_bytes / 2

    def next_size(self) -> int | None:
        """Return the next size to try; None: the search is over."""
        low, failed = self.largest, self.smallest_failed
        most = self.largest_wanted if failed is None else min(self.largest_wanted, failed - 1)
        if low >= most:
            return None
        if low == 0:
            return 1 if failed is None else most // 2 or 1
        fitted = self._fitted_size()
        if fitted is not None and fitted <= low:
            return None
        if fitted is not None and (failed is None or fitted < failed):
            return min(fitted, MOST_GROWTH * low, most)
        return min(2 * low, most) if failed is None else (low + failed) // 2

    def _fitted_size(self) -> int | None:
        """Return the size at which the line meets ``allowed_bytes``; None: no line, or it does not rise."""
        line = self._line()
        if self.allowed_bytes is None or line is None or line[2] <= 0:
            return None
        known_size, known_peak, per_sample = line
        return int(known_size + (self.allowed_bytes - known_peak) // per_sample)

    def _line(self) -> tuple[int, int, float] | None:
        """Return the largest size whose peak is known, its peak, and the bytes a sample; None before two trials."""
        if len(self.peaks) < 2:
            return None
        small, large = sorted(self.peaks)[-2:]
        return large, self.peaks[large], (self.peaks[large] - self.peaks[small]) / (large - small)
