"""A reward that can be verified: F1 of the words of an answer and of the right one, as SQuAD scores answers (Rajpurkar et al., 2016,
arXiv:1606.05250), 1 if both have the same words, 0 if they share none. Case, punctuation and articles do not count.

    ./train_llama grpo ... --reward scripts/word_f1.py
    ./train_llama generate ... > said.jsonl && python3 scripts/word_f1.py questions.jsonl said.jsonl

The second line prints the mean, of all answers, of those that end by themselves while the others count 0, and the share of these.
"""
import json
import re
import sys
from collections import Counter
from pathlib import Path


def words(text):
    return Counter(word for word in re.findall(r"\w+", text.lower()) if word not in ("a", "an", "the"))


def f1(answer, label):
    said, right = words(answer), words(label)
    return 2 * (said & right).total() / max(1, (said + right).total())


def reward(prompts, answers, labels):
    return [f1(answer, label) for answer, label in zip(answers, labels)]


if __name__ == "__main__":
    asked, said = ([json.loads(line) for line in Path(path).read_text().splitlines() if line.startswith("{")] for path in sys.argv[1:3])
    scores = [f1(a["completion"], q["completion"][-1]["content"]) for q, a in zip(asked, said, strict=True)]
    ended = [a["finish_reason"] == "stop" for a in said]
    whole = sum(score for score, end in zip(scores, ended) if end)
    print(f"word F1 {sum(scores) / len(scores):.3f}, {whole / len(scores):.3f} where answers that do not end count 0; {sum(ended) / len(ended):.1%} end")
