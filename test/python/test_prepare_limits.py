"""data/prepare.py: templates that never end or fill the memory, and records that are nested too deeply, each end in one message."""

import json
import os
import resource
import signal
import subprocess
import sys

import pytest
from preparing import CHAT, CHATML, DATA, bench  # noqa: F401

import limits  # noqa: E402
import prepare  # noqa: E402

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
RECURSIVE = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
DOUBLING = "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize("template, expected", [
    (ENDLESS, "the chat template has not ended after 0.2 seconds"),
    (RECURSIVE, "the chat template has not ended after 0.2 seconds"),
    ("{{ 3 ** (10 ** 9) % 7 }}", "the chat template has not ended after 0.2 seconds"),
    ("{{ 'a' * 10 ** 11 }}", "the chat template needs more than 64 MiB of memory"),
    ("{{ '%99999999999d' % 1 }}", "the chat template needs more than 64 MiB of memory"),
    (DOUBLING, "the chat template needs more than 64 MiB of memory"),
    ("{{ 'a' * 5000 }}", "the chat template makes a text of 5,000 characters, more than 4,000"),
    ("{% for i in range(10 ** 12) %}{% endfor %}", "the chat template refuses its messages: Range too big"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "the chat template refuses its messages: maximum recursion depth exceeded"),
])
@pytest.mark.parametrize("task", ["sft", "prompts"])
def test_a_template_that_takes_too_much(bench, monkeypatch, task, template, expected):
    for name, value in {"SECONDS": 0.2 if "seconds" in expected else 60, "MEMORY": 64 << 20, "CHARACTERS": 4000}.items():
        monkeypatch.setattr(limits, name, value)
    usual = resource.getrlimit(resource.RLIMIT_AS)
    error = bench.refused(task, bench.tokenizer(template), [{"messages": CHAT if task == "sft" else CHAT[:2]}])
    assert f"record 1 (line 1) of in.jsonl: {expected}" in error
    assert resource.getrlimit(resource.RLIMIT_AS) == usual and signal.getitimer(signal.ITIMER_REAL)[0] == 0


@pytest.mark.parametrize("record", [f'{{"messages": {DEEP}}}', f'{{"text": "a", "more": {DEEP}}}',
                                    json.dumps({"messages": CHAT, "tools": DEEP})])
def test_a_record_that_is_nested_too_deeply(bench, record):
    error = bench.refused("sft", bench.tokenizer(CHATML), [{"text": "a"}, record])
    assert "record 2 (line 2) of in.jsonl: its JSON is nested too deeply\n" in error


def test_deep_json_elsewhere(bench):
    (bench.path / "list.json").write_text(DEEP)
    assert "list.json: broken JSON: maximum recursion" in bench.refused("sft", bench.tokenizer(CHATML), str(bench.path / "list.json"))
    error = bench.refused("sft", bench.tokenizer(CHATML), [{"messages": CHAT}], "--chat_template_kwargs", '{"a": ' + DEEP[:50_000])
    assert "is no JSON object" in error


def test_a_record_that_is_too_deep_to_reach_a_worker_is_prepared_all_the_same(bench):
    """A list of a .json file is parsed at once, and its records are pickled for the workers, which takes more stack than parsing them."""
    deep = json.loads("[" * 600 + "]" * 600)
    (bench.path / "list.json").write_text(json.dumps([{"text": "a"}] * 2000 + [{"text": "b", "more": deep}]))
    arguments = ["sft", "--input", str(bench.path / "list.json"), "--tokenizer", bench.tokenizer(), "--out", str(bench.path / "o")]
    prepare.prepare("sft", prepare.build_parser().parse_args(arguments), 2)
    assert (bench.path / "o").exists()


def test_arguments_and_files_in_another_encoding(bench):
    """Of a shell in Latin-1."""
    latin = bench.path / os.fsdecode(b"caf\xe9.jsonl")
    latin.write_text('{"text": "a"}\n')
    tokenizer = bench.tokenizer(CHATML)
    for flags in (["prompts", "--prompt", b"caf\xe9"], ["sft", "--input", latin], ["sft", "--input", bench.path / "*.jsonl"]):
        command = [sys.executable, DATA / "prepare.py", *flags, "--tokenizer", tokenizer, "--out", bench.path / "out.safetensors"]
        result = subprocess.run(command, capture_output=True)
        assert result.returncode == 1 and b"\\udce9" in result.stderr and b" is not UTF-8\n  fix: " in result.stderr, result.stderr
    (bench.path / "latin.jinja").write_bytes(b"{{ 'caf\xe9' }}")
    error = bench.refused("sft", tokenizer, [{"messages": CHAT}], "--tokenizer_chat_template", str(bench.path / "latin.jinja"))
    assert "latin.jinja: is no text in UTF-8" in error
