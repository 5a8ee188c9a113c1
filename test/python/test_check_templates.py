"""scripts/check_templates.py, on templates of its own: TRL's are not here."""

import sys

import pytest
from preparing import CHATML, DATA

sys.path.insert(0, str(DATA.parent / "scripts"))

import check_templates  # noqa: E402

HEADED = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
MARKED = HEADED + ("{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + BODY }}{% endgeneration %}"
                   "{% else %}{{ m['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}")
TWIN = MARKED.replace("BODY", "'<|im_end|>'").replace("{% endgeneration %}", "{% endgeneration %}{{ '\\n' }}")


@pytest.mark.parametrize("plain, twin, expected", [
    (CHATML, TWIN, "="),
    (CHATML, MARKED.replace("BODY", "'<|im_end|>\\n'"), "~"),
    (CHATML, None, "✓"),
    (CHATML, CHATML.replace("<|im_end|>", "<|end|>"), "✓"),
    (CHATML, CHATML.replace("{{ '<|im_start|>'", "{% generation %}{% endgeneration %}{{ '<|im_start|>'"), "✓"),
    (CHATML, TWIN.replace("{% endgeneration %}{{ '\\n' }}", "{% endgeneration %}").replace("m['content'] + '<|im_end|>'",
     "'<|im_end|>\\n'").replace("{% generation %}", "{{ m['content'] }}{% generation %}"), "the marks do not train `'answer1'`"),
    (CHATML.replace("{{ '<|im_start|>'", "{{ raise_exception('no') if m['content'] == 'answer1' else '<|im_start|>'"), None,
     "refused: the chat template refuses its messages: no"),
])
def test_verdicts(plain, twin, expected):
    assert check_templates.check(plain, twin)["one turn"] == expected


def test_words_tell_what_is_trained():
    """Without asking a twin: a template that shows the assistant's word twice, and one that hands it to the user."""
    outcome = check_templates.Outcome(["question0", "answer1", "answer1"], [1, 1, 0])
    assert list(check_templates.faults(outcome, check_templates.CHATS["one turn"])) == [
        "`question0`, which is not the assistant's, is trained", "`answer1` of the assistant's is not trained"]
    lost = check_templates.Outcome(["question0"], [0])
    assert list(check_templates.faults(lost, check_templates.CHATS["one turn"])) == ["`answer1` of the assistant's is lost"]
