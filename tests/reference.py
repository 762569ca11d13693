"""
The definition of the targets, in plain Python: one deque per environment. It imports nothing of ours.

A stream is a list of rows in the order they were lived. Every row is pushed once; a window leaves the deque when it
holds N rows or when its episode ends, and then its target is summed up from the definition.
"""

from collections import deque
from dataclasses import dataclass

n_streams = 0  # given to targets() so far

CONTINUES, TERMINATED, TIME_LIMIT = "continues", "terminated", "time limit"


@dataclass
class Row:
    reward: float
    value: float  # V(s_t)
    end: str = CONTINUES
    final_value: float = 0.0  # V(final observation), of a time limit


def targets(rows: list[Row], last_value: float, gamma: float, horizon: int, lam: float = 1.0) -> list[float]:
    """
    The target of each row of a stream, in order. Windows that reach the stream's end inside an episode bootstrap from
    ``last_value``, V of the observation after the last row.
    """
    global n_streams
    n_streams += 1
    result: list[float] = []
    window: deque[Row] = deque()

    def leave(bootstrap: float) -> None:
        result.append(discounted(list(window), bootstrap, gamma, lam))
        window.popleft()

    for row in rows:
        if len(window) == horizon:
            leave(row.value)
        window.append(row)
        if row.end != CONTINUES:
            bootstrap = row.final_value if row.end == TIME_LIMIT else 0.0
            while window:
                leave(bootstrap)
    while window:
        leave(last_value)
    return result


def discounted(window: list[Row], bootstrap: float, gamma: float, lam: float) -> float:
    """
    Σ_{n<k} (1−λ) λ^{n−1} G^(n) + λ^{k−1} G^(k), with G^(n) = r_0 + γ r_1 + … + γ^{n−1} r_{n−1} + γ^n V_n over the first
    n rows of the window's k, and V_k the bootstrap.
    """
    k = len(window)
    following = [row.value for row in window[1:]] + [bootstrap]

    def n_step(n: int) -> float:
        rewards = sum(gamma**i * window[i].reward for i in range(n))
        # 0 times infinity: what has no weight does not count
        return rewards + (gamma**n * following[n - 1] if gamma**n > 0 and following[n - 1] != 0 else 0.0)

    if lam == 1.0:
        return n_step(k)
    return sum((1 - lam) * lam ** (n - 1) * n_step(n) for n in range(1, k)) + lam ** (k - 1) * n_step(k)


def vtrace(
    rewards: list[float],
    values: list[float],
    ends: list[bool],
    last_value: float,
    rho: list[float],
    gamma: float,
    horizon: int,
    lam: float,
) -> list[float]:
    """
    v_t − V(s_t) = Σ_{i=t}^{t+k−1} γ^{i−t} (Π_{j=t}^{i−1} λ c_j) ρ_i δ_i of IMPALA, its product written out, over a
    window that ends with the episode (a time limit's bootstrap is folded into the reward). The advantages of a stream.
    """
    n_rows = len(rewards)
    advantages = []
    for t in range(n_rows):
        total = 0.0
        for i in range(t, min(t + horizon, n_rows)):
            next_value = 0.0 if ends[i] else (values[i + 1] if i + 1 < n_rows else last_value)
            delta = rewards[i] + gamma * next_value - values[i]
            product = 1.0
            for j in range(t, i):
                product *= lam * rho[j]
            total += gamma ** (i - t) * product * rho[i] * delta
            if ends[i]:
                break
        advantages.append(total)
    return advantages
