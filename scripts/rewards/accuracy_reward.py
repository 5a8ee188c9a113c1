"""TRL's reward function of this name, as the installed TRL computes it (pip install trl math_verify). An answer that it does not judge gets 0."""

from trl.rewards import accuracy_reward


def reward(prompts, answers, labels):
    return [value or 0.0 for value in accuracy_reward([[{"content": answer}] for answer in answers], labels)]
