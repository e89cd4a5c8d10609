"""Conversations become prompts as the checkpoint's template has them, and the template can do nothing else."""

import json
from pathlib import Path

import pytest

from dsim.engine.errors import ModelError
from dsim.live import chat
from dsim.live.chat import chat_template, read_conversations, render
from dsim.live.config import ModelConfig
from dsim.live.prompts import conversations, prompts_of

WORDS = ModelConfig("words", 1, 8, 1, 1, 8, 8, 600, 64, 4, 599)
TEMPLATE = (
    "{% for m in messages %}{{ bos_token }}[{{ m.role }}] {{ m.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
HELLO = [{"role": "user", "content": " hello "}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    said = {"chat_template": TEMPLATE, "bos_token": {"content": "<s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(said))
    return tmp_path


def test_a_template_is_rendered_up_to_where_the_answer_begins(folder: Path) -> None:
    template = chat_template(folder)
    assert template == TEMPLATE
    assert render(template, [[*HELLO, {"role": "assistant", "content": "hi"}], HELLO], folder) == [
        "<s>[user] hello\n<s>[assistant] hi\n[assistant] ",
        "<s>[user] hello\n[assistant] ",
    ]


def test_it_is_rendered_as_transformers_does(folder: Path) -> None:
    pytest.importorskip("transformers")
    from transformers.utils.chat_template_utils import render_jinja_template

    template = (
        TEMPLATE + "{{ messages | tojson }}{%- for m in messages %}{% if true %}{% break %}{% endif %}{% endfor %}"
    )
    theirs, _ = render_jinja_template([HELLO], chat_template=template, add_generation_prompt=True, bos_token="<s>")
    assert render(template, [HELLO], folder) == theirs


def test_a_file_of_its_own_goes_before_the_tokenizers(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert chat_template(folder) == "{{ messages[0].content }}"
    assert chat_template(folder / "nowhere") is None


def test_of_several_templates_the_default_one_is_taken(folder: Path) -> None:
    several = [{"name": "tools", "template": "x"}, {"name": "default", "template": "y"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    assert chat_template(folder) == "y"


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "is unsafe|its chat template fails"),
        ("{% include '/etc/passwd' %}", "its chat template fails: no loader"),
        ("{{ messages.append(1) }}", "its chat template fails: .*unsafe|not safely"),
        ("{{ raise_exception('roles must alternate') }}", "its chat template fails: roles must alternate"),
        ("{% if %}", "its chat template fails: Expected an expression"),
        ("{{ range(10**9) | list }}", "its chat template fails: .*[Rr]ange"),
    ],
)
def test_a_template_that_reaches_out_or_fails_is_one_line(folder: Path, template: str, says: str) -> None:
    with pytest.raises(ModelError, match=says):
        render(template, [HELLO], folder)


ENDLESS = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{{ f(n - 1) if n }}{{ f(n - 1) if n }}{% endmacro %}{{ f(99) }}",
    "{{ 7 ** (messages | length + 35000000) }}",  # inside C code
]


@pytest.mark.parametrize("template", ENDLESS)
def test_a_template_without_end_is_ended(folder: Path, template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "SECONDS", 0.3)
    with pytest.raises(ModelError, match=r"its chat template takes more than 0.3 s of the CPU for conversation 1$"):
        render("{% if messages | length > 1 %}" + template + "{% endif %}", [HELLO, HELLO * 2], folder)


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ 'x' * 11000000 }}", "its chat template fails: it makes 11000000 characters of 41"),
        ("{{ 'x' * 4000000000 }}", "its chat template fails: MemoryError"),
        ("{% set n = namespace(s='xx') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}", "MemoryError"),
    ],
)
def test_a_template_that_grows_is_ended(
    folder: Path, template: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat, "MEMORY", 300 << 20)
    with pytest.raises(ModelError, match=says):
        render(template, [HELLO], folder)


def test_conversations_are_read_a_line_each_and_other_files_are_not_theirs(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": HELLO}) + "\n\n")
    assert read_conversations(str(path)) == [HELLO]
    path.write_text("[1, 2]\n")
    assert read_conversations(str(path)) is None
    assert read_conversations(str(tmp_path / "text.txt")) is None


def test_conversations_are_tokenised_by_the_tokenizer_that_is_named(folder: Path, tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {"?": 0, "user": 1, "hello": 2, "assistant": 3, "[": 4, "]": 5}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    made.save(str(folder / "tokenizer.json"))
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": HELLO}))
    for named in (str(folder), str(folder / "tokenizer.json")):
        (asked,) = conversations(str(path), "elsewhere", WORDS, named) or []
        assert asked.tolist() == [4, 1, 5, 2, 4, 3, 5]
    assert prompts_of([asked])(7, 7).tolist() == asked.tolist()
