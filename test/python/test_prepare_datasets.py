"""data/prepare.py on records in the layout of well-known data sets. Each is prepared without changes, or refused with a reason."""

import json

import pytest
from preparing import CALLING, CHATML, chat, gpt, turn

Q, A, B = "Name a river in Peru.", "The Maranon.", "Bread."


def document(*turns, system=None, trained=(-1,), is_pair=False):
    """The text of a chat and its trained texts. A chat that ends with the user's turn has the generation prompt."""
    texts = [turn("system", system)] * (system is not None) + [turn(("user", "assistant")[i % 2], text) for i, text in enumerate(turns)]
    text = "".join(texts) + ("<|im_start|>assistant\n" if len(turns) % 2 else "")
    return text.rstrip("\n") if is_pair else text, [turns[i] + "<|im_end|>" for i in trained] if len(turns) % 2 == 0 else []


def plain(before, answer):
    return before + answer + "<|endoftext|>", [answer + "<|endoftext|>"]


def pair(*before, system=None):
    return [document(*before, answer, system=system, is_pair=True) for answer in (A, B)]


ONE = [document(Q, A)]
PAIR = pair(Q)
PAIRED = {"chosen": chat(Q, A), "rejected": chat(Q, B)}
CALL, TOOL = {"name": "f", "arguments": {"a": 1}}, {"name": "f", "description": "d", "parameters": {"a": {"type": "int"}}}
CALLED = (f"# Tools {json.dumps([{'type': 'function', 'function': TOOL}])}\n{turn('user', Q)}<|im_start|>assistant\n<call>{json.dumps(CALL)}<|im_end|>\n",
          [f"<call>{json.dumps(CALL)}<|im_end|>"])
NO_FORM = "which match no supported format\n  fix: the supported formats are "
NO_PAIR = "has no field 'chosen', so it is not a pair of answers"
# Data set, record, task, and the documents (text and trained texts) or the message of the refusal.
LAYOUTS = [
    ("tatsu-lab/alpaca", {"instruction": Q, "input": "South America", "output": A, "text": "Below"}, "sft", [document(f"{Q}\n\nSouth America", A)]),
    ("alpaca of LLaMA-Factory", {"instruction": Q, "input": "", "output": A, "system": "Be kind.", "history": [["a", "b"]]}, "sft",
     [document("a", "b", Q, A, system="Be kind.", trained=(1, 3))]),
    ("databricks/dolly", {"instruction": Q, "context": "Peru.", "response": A, "category": "qa"}, "sft", [document(f"{Q}\n\nPeru.", A)]),
    ("openai/gsm8k", {"question": "2+3?", "answer": "2+3=<<2+3=5>>5\n#### 5"}, "sft", [document("2+3?", "2+3=<<2+3=5>>5\n#### 5")]),
    ("Open-Orca/OpenOrca", {"id": "n", "system_prompt": "Be terse.", "question": Q, "response": A}, "sft", [document(Q, A, system="Be terse.")]),
    ("nvidia/HelpSteer2", {"prompt": Q, "response": A, "helpfulness": 3, "verbosity": 2}, "sft", ONE),
    ("HuggingFaceH4/ultrachat_200k", {"prompt": Q, "prompt_id": "0", "messages": chat(Q, A, "Sure?", "Yes.")}, "sft",
     [document(Q, A, "Sure?", "Yes.", trained=(1, 3))]),
    ("trl-lib/Capybara", {"source": "s", "messages": chat(Q, A), "num_turns": 1}, "sft", ONE),
    ("allenai/tulu-3-sft-mixture", {"id": "t", "messages": chat(Q, A), "source": "s"}, "sft", ONE),
    ("AI-MO/NuminaMath-CoT", {"source": "s", "problem": Q, "solution": A, "messages": chat(Q, A)}, "sft", ONE),
    ("open-r1/OpenR1-Math-220k", {"problem": Q, "solution": A, "answer": "8", "generations": ["t"], "messages": chat(Q, f"<think>t</think>{A}")},
     "sft",
     [document(Q, f"<think>t</think>{A}")]),
    ("open-thoughts/OpenThoughts-114k", {"system": "Think.", "conversations": chat(Q, A, keys=("from", "value"))}, "sft",
     [document(Q, A, system="Think.")]),
    ("BAAI/Infinity-Instruct", {"id": 0, "conversations": gpt(Q, A), "label": {"ability_en": ["x"]}, "reward": 3.1}, "sft", ONE),
    ("teknium/OpenHermes-2.5", {"conversations": [turn | {"weight": None} for turn in gpt(Q, A)], "system_prompt": None, "source": "s"}, "sft", ONE),
    ("ShareGPT", {"id": "i", "conversations": gpt(Q, A, "And?")}, "sft",
     [(turn("user", Q) + turn("assistant", A) + turn("user", "And?"), [f"{A}<|im_end|>"])]),
    ("ShareGPT, the model first", {"conversations": gpt("", "Hello.", Q, A)[1:]}, "sft",
     [(turn("assistant", "Hello.") + turn("user", Q) + turn("assistant", A), ["Hello.<|im_end|>", f"{A}<|im_end|>"])]),
    ("ShareGPT, other models", {"conversations": [*gpt("Hi"), {"from": "chatgpt", "value": "Hello"}, *gpt(Q), {"from": "bard", "value": A}]}, "sft",
     [document("Hi", "Hello", Q, A, trained=(1, 3))]),
    ("lmsys/lmsys-chat-1m", {"conversation_id": "c", "conversation": chat(Q, A), "openai_moderation": []}, "sft", ONE),
    ("ms-swift's queries", {"query": Q, "response": A, "history": [["a", "b"]], "system": "Be kind."}, "sft",
     [document("a", "b", Q, A, system="Be kind.", trained=(1, 3))]),
    ("contents in parts", {"messages": [m | {"content": [{"type": "text", "text": m["content"]}]} for m in chat(Q, A)]}, "sft", ONE),
    ("messages in a cell of CSV", {"messages": json.dumps(chat(Q, A))}, "sft", ONE),
    ("messages in a cell, written by pandas", {"messages": str(chat(Q, A))}, "sft", ONE),
    ("messages in a cell, of a parquet file in pandas", {"messages": str(chat(Q, A)).replace("}, {", "}\n {")}, "sft", ONE),
    ("Salesforce/xlam-function-calling-60k", {"id": 0, "query": Q, "answers": json.dumps([CALL]), "tools": json.dumps([TOOL])}, "sft", [CALLED]),
    ("trl-lib/tldr", {"prompt": f"{Q}\n\nTL;DR:", "completion": f" {A}"}, "sft", [plain(f"{Q}\n\nTL;DR:", f" {A}")]),
    ("timdettmers/openassistant-guanaco", {"text": f"### Human: {Q}### Assistant: {A}"}, "sft",
     [(f"### Human: {Q}### Assistant: {A}<|endoftext|>", [f"## Human: {Q}### Assistant: {A}<|endoftext|>"])]),
    ("glaiveai/glaive-function-calling-v2", {"system": "SYSTEM: S", "chat": f"USER: {Q}\n\n\nASSISTANT: {A}"}, "sft", NO_FORM),
    ("GAIR/lima", {"conversations": [Q, A], "source": "s"}, "sft", "conversations[0] is not a message with a role"),
    ("OpenAssistant/oasst1", {"message_id": "a", "parent_id": None, "text": Q, "role": "prompter"}, "sft", "is a single message of a conversation"),
    ("trl-lib/kto-mix-14k", {"prompt": chat(Q), "completion": chat("", A)[1:], "label": False}, "sft", "is one answer with a judgement"),
    ("the same in CSV", {"prompt": Q, "completion": A, "label": "False"}, "sft", "is one answer with a judgement"),
    ("trl-lib/math_shepherd", {"prompt": Q, "completions": ["a", "b"], "labels": [True, False]}, "sft", "is an answer in steps"),
    ("peiyi9979/Math-Shepherd", {"input": f"{Q} ки", "label": f"{Q} +", "task": "GSM8K"}, "sft", NO_FORM),
    ("openai/prm800k", {"question": {"problem": Q}, "label": {"steps": []}, "labeler": "l"}, "sft", NO_FORM),
    ("HuggingFaceH4/ultrafeedback_binarized", {"prompt": Q, "messages": chat(Q, A), **PAIRED, "score_chosen": 8.5}, "pref", PAIR),
    ("trl-lib/ultrafeedback_binarized", PAIRED | {"score_chosen": 8.0, "score_rejected": 2.0}, "pref", PAIR),
    ("argilla/ultrafeedback-binarized-preferences-cleaned", {"prompt": Q, **PAIRED, "chosen-rating": 5.0, "chosen-model": "a"}, "pref", PAIR),
    ("Skywork/Skywork-Reward-Preference-80K", PAIRED | {"source": "m"}, "pref", PAIR),
    ("argilla/distilabel-capybara-dpo", {"conversation": [{"input": Q, "output": A}], "prompt": Q, **PAIRED, "turns": 1}, "pref", PAIR),
    ("Anthropic/hh-rlhf", {"chosen": f"\n\nHuman: {Q}\n\nAssistant: {A}", "rejected": f"\n\nHuman: {Q}\n\nAssistant: {B}"}, "pref",
     [plain(f"\n\nHuman: {Q}\n\nAssistant: ", answer) for answer in (A, B)]),
    ("Intel/orca_dpo_pairs", {"system": "", "question": Q, "chosen": A, "rejected": B}, "pref", PAIR),
    ("argilla/distilabel-intel-orca-dpo-pairs", {"system": "Be brief.", "input": Q, "chosen": A, "rejected": B, "rating": [9, 3]}, "pref",
     pair(Q, system="Be brief.")),
    ("argilla/distilabel-math-preference-dpo", {"instruction": Q, "chosen_response": A, "rejected_response": B, "chosen_rating": 9}, "pref", PAIR),
    ("LLaMA-Factory's pairs", {"conversations": gpt(Q), "chosen": gpt("", A)[1], "rejected": gpt("", B)[1]}, "pref", PAIR),
    ("pairs of LLaMA-Factory's version 1", {f"{name}_messages": [m | {"content": [{"type": "text", "value": m["content"]}]} for m in messages]
                                           for name, messages in PAIRED.items()}, "pref", PAIR),
    *[("ms-swift's pairs", record, "pref", PAIR) for record in (
        {"messages": chat(Q, A), "rejected_response": B}, {"messages": chat(Q, A), "rejected_response": chat("", B)[1:]},
        {"messages": chat(Q, A), "rejected_messages": chat(Q, B)}, {"query": Q, "response": A, "rejected_response": B})],
    ("PKU-Alignment/PKU-SafeRLHF", {"prompt": Q, "response_0": B, "response_1": A, "is_response_0_safe": True, "better_response_id": 1}, "pref",
     PAIR),
    ("nvidia/HelpSteer3", {"context": chat(Q), "response1": A, "response2": B, "overall_preference": -2, "domain": "g"}, "pref", PAIR),
    ("nvidia/HelpSteer2, preferences", {"prompt": Q, "response_1": B, "response_2": A, "preference_strength": 3, "split": "train"}, "pref", PAIR),
    ("lmsys/chatbot_arena_conversations", {"conversation_a": chat(Q, B), "conversation_b": chat(Q, A), "winner": "model_b", "turn": 1}, "pref", PAIR),
    ("stanfordnlp/SHP", {"history": Q, "human_ref_A": A, "human_ref_B": B, "labels": 1, "domain": "d"}, "pref", PAIR),
    ("lvwerra/stack-exchange-paired", {"qid": 1, "question": Q, "response_j": A, "response_k": B}, "pref", PAIR),
    ("answers without their question", {"response_j": A, "response_k": B}, "pref", NO_PAIR),
    ("openbmb/UltraFeedback", {"instruction": Q, "completions": [{"response": A, "overall_score": 8.0}]}, "pref", NO_PAIR),
    ("kto-mix for pairs", {"prompt": chat(Q), "completion": chat("", A)[1:], "label": True}, "pref", "is one answer with a judgement"),
    ("oasst1 for pairs", {"text": Q, "role": "prompter", "rank": None}, "pref", "is a single message of a conversation"),
    ("trl-lib/kto-mix-14k, judged", {"prompt": chat(Q), "completion": chat("", A)[1:], "label": False}, "unpaired", ONE),
    ("the same in CSV, judged", {"prompt": Q, "completion": A, "label": "False"}, "unpaired", [plain(Q, A)]),
    ("LLaMA-Factory's judged chats", {"messages": chat("Hi", "Hello", Q, A), "kto_tag": True}, "unpaired", [document("Hi", "Hello", Q, A)]),
    ("LLaMA-Factory's judged answers", {"instruction": Q, "output": A, "history": [["a", "b"]], "kto_tag": True}, "unpaired", [document("a", "b", Q, A)]),
    ("ms-swift's judged chats", {"messages": chat(Q, A), "label": 1}, "unpaired", ONE),
    ("a judged answer of several turns", {"prompt": chat(Q), "completion": chat("", A, "Sure?", "Yes.")[1:], "label": 0}, "unpaired",
     [document(Q, A, "Sure?", "Yes.", trained=(1, 3))]),
    ("pairs as single answers", PAIRED | {"score_chosen": 8.0}, "unpaired", [document(Q, A), document(Q, B)]),
    ("HelpSteer3 as single answers", {"context": chat(Q), "response1": A, "response2": B, "overall_preference": -2}, "unpaired", [document(Q, A), document(Q, B)]),
    ("trl-lib/DeepMath-103K", {"prompt": chat(Q), "solution": A}, "rl", ONE),
    ("BytedTsinghua-SIA/DAPO-Math-17k", {"data_source": "d", "prompt": chat(Q), "reward_model": {"ground_truth": A, "style": "rule"}}, "rl", ONE),
    ("trl-lib/ultrafeedback-prompt", {"prompt": chat(Q)}, "rl", [document(Q)]),
    ("OpenRLHF/prompt-collection-v0.1", {"dataset": "d", "context": "c", "context_messages": chat(Q), "id": "1"}, "rl", [document(Q)]),
    ("OpenRLHF's prompts with a label", {"context_messages": chat(Q), "label": A}, "rl", ONE),
    ("prompts alone", {"prompt": Q}, "rl", [document(Q)]), ("gsm8k", {"question": Q, "answer": A}, "rl", ONE),
    ("chats of several turns", {"messages": chat("Hi", "Hello", Q, A)}, "rl", [document("Hi", "Hello", Q, A)]),
    ("text alone", {"text": Q}, "rl", "has fields text, which match no supported format"),
    ("kto-mix", {"prompt": Q, "completion": A, "label": True}, "rl", "is one answer with"),
]
JUDGES = {"better_response_id", "overall_preference", "preference_strength", "winner", "labels"}
ELSEWHERE = {"reward_model", "role", "tools", "answers", "messages", "conversations", "context", "label", "kto_tag"}  # fields that are read, and look different in the document


def texts_in(value):
    if isinstance(value, (list, dict)):
        return [text for part in (list(value.values())[1:] if isinstance(value, dict) else value) for text in texts_in(part)]  # no roles
    return [value] if isinstance(value, str) else []


@pytest.mark.parametrize("record, task, expected", [row[1:] for row in LAYOUTS], ids=[row[0] for row in LAYOUTS])
def test_a_record_of_a_well_known_data_set(bench, record, task, expected):
    tokenizer = bench.tokenizer(CALLING, merges=[])
    if isinstance(expected, str):
        assert expected in bench.refused(task, tokenizer, [record])
        return
    documents = bench.run(task, tokenizer, [record])
    assert list(zip(documents.texts(), documents.trained())) == expected
    assert ("without the chat template" in bench.printed) == ("<|im_start|>" not in expected[0][0])
    # Everything that is not in the documents is counted.
    for name, value in record.items():
        shown = all(text in "".join(documents.texts()) for text in texts_in(value)) and (texts_in(value) or value in (None, "", [], {}))
        assert shown or name in JUDGES | ELSEWHERE or f"{name} (1)" in bench.printed, name


@pytest.mark.parametrize("record", [row[1] for row in LAYOUTS if row[2] == "pref" and JUDGES & row[1].keys()][:5])
def test_draws_are_dropped_and_counted(bench, record):
    draw = {"winner": "tie", "labels": 2, "better_response_id": -1, "overall_preference": 0, "preference_strength": 0}
    judge = next(name for name in draw if name in record)
    assert len(bench.run("pref", bench.tokenizer(CHATML), [record | {judge: draw[judge]}, record, record | {judge: str(record[judge])}]).ids) == 4
    assert bench.row("neither answer is better") == 1 and bench.row("dropped") == 1
