"""A verifiable reward: F1 of the words of an answer and of the right answer, as in SQuAD (Rajpurkar et al., 2016, arXiv:1606.05250): 1 if both
have the same words, 0 if they share none. Case, punctuation and articles are ignored.

    ./train_llama grpo ... --reward scripts/word_f1.py
    ./train_llama generate ... > said.jsonl && python3 scripts/word_f1.py questions.jsonl said.jsonl

The second line prints the mean over all answers, the mean with unfinished answers counted as 0, and the share of finished answers.
"""
import json
import re
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "data"))
from program import run  # noqa: E402


def words(text):
    return Counter(word for word in re.findall(r"\w+", text.lower()) if word not in ("a", "an", "the"))


def f1(answer, label):
    said, right = words(answer), words(label)
    return 2 * (said & right).total() / max(1, (said + right).total())


def reward(prompts, answers, labels):
    return [f1(answer, label) for answer, label in zip(answers, labels)]


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    asked, said = ([json.loads(line) for line in Path(path).read_text().splitlines() if line.startswith("{")] for path in sys.argv[1:])
    if len(asked) != len(said) or not said:
        sys.exit(f"{sys.argv[2]} has {len(said)} answers to the {len(asked)} questions of {sys.argv[1]}\n  fix: give one answer to each, in their order")
    scores = [f1(a["completion"], q["completion"][-1]["content"]) for q, a in zip(asked, said)]
    ended = [a["finish_reason"] == "stop" for a in said]
    whole = sum(score for score, end in zip(scores, ended) if end)
    print(f"word F1 {sum(scores) / len(scores):.3f}, {whole / len(scores):.3f} with 0 for unfinished answers; {sum(ended) / len(ended):.1%} finished")


if __name__ == "__main__":
    run(main)
