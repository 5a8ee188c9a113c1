"""GRPO by hand: a policy over four answers, whose every expectation is a finite sum. Chapter G: grpo.md."""

import itertools

import numpy as np

theta = np.array([0.5, 0.0, -0.5, -1.0])  # logits of four answers to one prompt
reward = np.array([0.2, 0.0, 0.0, 1.0])  # the best answer is the rarest


def policy(theta):
    e = np.exp(theta - theta.max())
    return e / e.sum()


def scores(theta):
    """Row a: the gradient of log p[a] with respect to theta, onehot(a) - p."""
    return np.eye(len(theta)) - policy(theta)


def exact(theta, f=lambda p: p @ reward, h=1e-6):
    """The gradient of a function of the policy, E[R], by finite differences."""
    return np.array([(f(policy(theta + h * e)) - f(policy(theta - h * e))) / (2 * h) for e in np.eye(len(theta))])


def one_sample(theta, baseline):
    """Mean and total variance of (R - baseline) grad log p, over the answer that is sampled."""
    p = policy(theta)
    each = (reward - baseline)[:, None] * scores(theta)
    mean = p @ each
    return mean, p @ (each**2).sum(axis=1) - mean @ mean


def advantages(rewards, estimator):
    """Advantages of a group of answers to one prompt, as llmc/train/advantages.cpp computes them."""
    n = len(rewards)
    centred = rewards - rewards.mean()
    if estimator == "reinforce":
        return rewards
    if estimator == "dr_grpo":
        return centred
    if estimator == "rloo":
        return centred * n / (n - 1)
    return centred / (rewards.std(ddof=1) + 1e-9)  # group_norm


def group(theta, n, estimator):
    """Mean and total variance of the mean over a group of n answers, over all groups."""
    p, s = policy(theta), scores(theta)
    mean, square = np.zeros(len(theta)), 0.0
    for answers in itertools.product(range(len(theta)), repeat=n):
        answers = list(answers)
        gradient = advantages(reward[answers], estimator) @ s[answers] / n
        mean += p[answers].prod() * gradient
        square += p[answers].prod() * (gradient @ gradient)
    return mean, square - mean @ mean


def several_steps(theta, steps, clip, lr=0.5):
    """Gradient steps on one batch, with an answer of each kind that was sampled: the ratios p / p_old afterwards."""
    old, answers = policy(theta), [0, 0, 0, 1, 1, 2, 2, 3]
    A = advantages(reward[answers], "group_norm")
    for _ in range(steps):
        ratio = (policy(theta) / old)[answers]
        slope = ratio * A  # of the objective ratio * A with respect to log p
        if clip:
            slope[np.clip(ratio, 1 - clip, 1 + clip) * A < ratio * A] = 0
        theta = theta + lr * slope @ scores(theta)[answers] / len(answers)
    return policy(theta) / old


def divergence(p, q):
    """KL(p || q)"""
    return p @ np.log(p / q)


def gradient_of_estimate(theta, q, slope):
    """The expected gradient of an estimate of KL(p || q), whose derivative with respect to d = log p - log q is the slope at d."""
    p = policy(theta)
    return p * slope(np.log(p / q)) @ scores(theta)


def show(name, values):
    print(f"  {name:<26}" + " ".join(f"{round(float(v), 7) + 0.0:8.4f}" for v in values))


def main():
    print("grad E[R], by differences, and as E[A grad log p]")
    show("differences", exact(theta))
    best = (policy(theta) * (scores(theta) ** 2).sum(axis=1)) @ reward / (policy(theta) @ (scores(theta) ** 2).sum(axis=1))
    mean = policy(theta) @ reward
    for name, baseline in [("no baseline", 0.0), ("baseline E[R]", mean), ("the best baseline", best), ("baseline 1", 1.0)]:
        show(name, one_sample(theta, baseline)[0])
    print("total variance of one sample")
    for name, baseline in [("no baseline", 0.0), ("baseline E[R]", mean), ("the best baseline", best), ("baseline 1", 1.0)]:
        show(f"{name}, {baseline:.3f}", [one_sample(theta, baseline)[1]])
    print("groups of 4: the expected gradient, and the variance of its estimate")
    for estimator in ("reinforce", "rloo", "dr_grpo", "group_norm"):
        g, variance = group(theta, 4, estimator)
        show(estimator, [*g, variance])
    print("p / p_old of each answer after 20 steps on one batch")
    show("without clipping", several_steps(theta, 20, None))
    show("clipped to 0.8 ... 1.2", several_steps(theta, 20, 0.2))
    print("estimates of KL(p || reference) as losses: their expected gradients, and those of two divergences, by differences")
    reference = policy(-theta)
    for name, slope in [("k2 = d^2 / 2", lambda d: d), ("k3 = exp(-d) - 1 + d", lambda d: 1 - np.exp(-d))]:
        show(name, gradient_of_estimate(theta, reference, slope))
    show("of KL(p || reference)", exact(theta, lambda p: divergence(p, reference)))
    show("of KL(reference || p)", exact(theta, lambda p: divergence(reference, p)))


if __name__ == "__main__":
    main()
