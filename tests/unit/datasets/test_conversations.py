"""Conversations: the text of the template, a mask over the answers, packs that lose nothing."""

import contextlib
import json
import math
import multiprocessing
import pickle
import random
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.packing import pack
from megatron.core.datasets.preprocessing import job
from megatron.core.datasets.preprocessing.chat_template import ChatTemplate, TemplateLimits
from megatron.core.datasets.preprocessing.documents import BadDocumentError
from megatron.core.foundation.errors import ConfigError, DataError
from tools import preprocess_data

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
BRACKETS = """{{ bos_token }}
{%- for message in messages %}
  {%- if message.role == 'user' %}
    {{- '[INST] ' + message.content + ' [/INST]' }}
  {%- elif message.role == 'assistant' %}
    {% generation %} {{- message.content + eos_token }}{% endgeneration %}
  {%- else %}
    {{- raise_exception('role ' + message.role) }}
  {%- endif %}
{%- endfor %}"""
THINKING = """{% for m in messages %}{{ m.role }}: {% if loop.last or m.role != 'assistant' %}
{{ m.content }}{% else %}{{ m.content.split('</think>')[-1] }}{% endif %};{% endfor %}
{% if add_generation_prompt %}assistant: {% endif %}"""
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def talk(*contents):
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]


@pytest.mark.parametrize("source", [CHATML, BRACKETS])
def test_templates_write_what_transformers_writes(source, bpe):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, chat_template=source, **SPECIAL
    )
    template = ChatTemplate(source, SPECIAL)
    for messages in (talk("Hi"), talk("Hi", "Hello\n", " more? ", "Ünï 漢字")):
        for prompt in (False, True):
            expected = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=prompt
            )
            assert template.render(messages, to_be_answered=prompt) == expected


@pytest.fixture(scope="module")
def bpe():
    tokenizers = pytest.importorskip("tokenizers")
    bpe = tokenizers.ByteLevelBPETokenizer()
    special = ["<|im_start|>", "<|im_end|>", "<s>", "</s>"]
    bpe.train_from_iterator(
        ["some words of no great length"], special_tokens=special, show_progress=False
    )
    return bpe._tokenizer


def test_answers_are_learned_and_the_rest_is_given():
    segments = ChatTemplate(CHATML, {}).segments(talk("Hi", "Hello", "More", "No"))
    assert "".join(segments[1::2]) == "Hello<|im_end|>\nNo<|im_end|>\n"
    assert segments[0] == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    whole = ChatTemplate(CHATML, {}).render(talk("Hi", "Hello", "More", "No"), to_be_answered=False)
    assert "".join(segments) == whole
    assert ChatTemplate(BRACKETS, SPECIAL).segments(talk("a", "b", "c")) == [
        "<s>[INST] a [/INST]", "b</s>", "[INST] c [/INST]",
    ]  # fmt: skip


def test_a_template_that_rewrites_earlier_answers_is_refused():
    template = ChatTemplate(THINKING, {})
    assert template.segments(talk("a", "<think>x</think>b"))[1].startswith("<think>")
    with pytest.raises(BadDocumentError) as caught:
        template.segments(talk("a", "<think>x</think>b", "c", "d"))
    assert caught.value.detail == "message 2 is written otherwise when others follow it"


ESCAPES = {
    "globals of a function": "{{ raise_exception.__globals__ }}",
    "by a filter": "{{ raise_exception|attr('__globals__') }}",
    "by a format string": "{{ '{0.__globals__}'.format(raise_exception) }}",
    "by a mapping": "{{ '{f.__globals__}'.format_map({'f': raise_exception}) }}",
    "by a reference to a method": "{% set f = '{0.__globals__}'.format %}{{ f(raise_exception) }}",
    "by a filter that formats": "{{ ['{0.__globals__}']|map('format', raise_exception)|first }}",
    "by a filter of attributes": "{{ [raise_exception]|map(attribute='__globals__')|first }}",
    "all classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "by a bound method": "{{ strftime_now.__self__.__class__.__mro__ }}",
    "a frame": "{{ (lipsum|default(cycler)).__init__.__globals__.os }}",
}


def test_a_source_that_is_no_template_is_refused_by_line():
    with pytest.raises(DataError, match="not valid: line 1"):
        ChatTemplate("{% for %}", {})


@pytest.mark.parametrize("name", ESCAPES)
def test_no_way_leads_from_a_template_to_the_modules_of_python(name):
    text = ""
    with contextlib.suppress(BadDocumentError):
        text = ChatTemplate(ESCAPES[name], {}).render(talk("a"), to_be_answered=False)
    assert text == ""
    assert ChatTemplate("{{ '{} {x}'.format(1, x=2) }}", {}).render([], to_be_answered=False)
    with pytest.raises(BadDocumentError, match="no"):
        ChatTemplate("{{ raise_exception('no') }}", {}).render(talk("a"), to_be_answered=False)


FOREVER = {
    "nested loops": "{% for a in x %}{% for b in x %}{% endfor %}{% endfor %}",
    "loops without a body": "{% for a in x %}{% for b in x if false %}{% endfor %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(messages|length * 60) }}",
    "a power": "{{ 10 ** (10 ** (messages|length + 8)) }}",
    "a power of constants": "{{ 10 ** (10 ** 9) }}",
    "comparing what shares its parts": "{% set n = namespace(x=[1], y=[1]) %}"
    "{% for i in range(50) %}{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}{% endfor %}"
    "{{ n.x == n.y }}",
}
TOO_LARGE = {
    "a product": "{{ messages[0].content * 10 ** 10 }}",
    "a product of constants": "{{ 'a' * 10 ** 10 }}",
    "a list": "{{ (messages * 10 ** 9)|length }}",
    "center": "{{ messages[0].content|center(10 ** 9) }}",
    "a width": "{{ '%1000000000d' % messages|length }}",
    "a width of format": "{{ '{:1000000000}'.format(messages|length) }}",
    "bytes": "{{ (messages|length).to_bytes(10 ** 9, 'big') }}",
    "doubling": "{% set n = namespace(x='ab') %}{% for i in range(60) %}"
    "{% set n.x = n.x ~ n.x %}{% endfor %}",
    "a long text": "{% for i in range(99999) %}{{ 'abc' * 1000 }}{% endfor %}",
}
SMALL = TemplateLimits(seconds=0.3, memory_mib=256)


@pytest.mark.parametrize("name", [*FOREVER, *TOO_LARGE])
def test_what_a_template_may_take_is_bounded(name):
    source = FOREVER.get(name) or TOO_LARGE[name]
    source = "{% set x = range(99999) %}" + source
    began = time.monotonic()

    def render():
        template = ChatTemplate(source, {}, origin="its/file.jinja", limits=SMALL)
        return template.render(talk("a"), to_be_answered=False)

    with pytest.raises((BadDocumentError, DataError)) as caught:
        render()
    told = str(caught.value)
    assert "its/file.jinja" in told
    flag = "0.3 s of processor time (--chat-template-seconds)"
    assert (flag if name in FOREVER else "256 MiB of memory allow (--chat-template-mib)") in told
    assert time.monotonic() - began < 60.0


def test_after_a_limit_the_next_conversation_is_rendered():
    loops = "{% set x = range(99999) %}" + FOREVER["nested loops"]
    source = "{% if messages[0].content == 'loop' %}" + loops + "{% endif %}fine"
    template = ChatTemplate(source, {}, limits=SMALL)
    for _ in range(2):
        with pytest.raises(BadDocumentError, match="over the limits of the chat template"):
            template.segments(talk("loop", "b"))
        assert template.segments(talk("a")) == ["fine"]


def test_a_template_is_rendered_in_threads_forks_and_copies():
    template = ChatTemplate(CHATML, {})
    wanted = template.segments(talk("a", "b"))
    with ThreadPoolExecutor(4) as pool:
        assert all(one == wanted for one in pool.map(template.segments, [talk("a", "b")] * 64))
    copied = pickle.loads(pickle.dumps(template))
    assert copied.segments(talk("a", "b")) == wanted
    with multiprocessing.get_context("fork").Pool(2) as workers:
        assert workers.map(template.segments, [talk("a", "b")] * 8) == [wanted] * 8
    assert template.segments(talk("a", "b")) == wanted


def test_a_renderer_that_was_killed_is_started_again():
    template = ChatTemplate(CHATML, {})
    template._child.kill()
    template._child.wait()
    assert template.segments(talk("a")) == ["<|im_start|>user\na<|im_end|>\n"]


@pytest.mark.parametrize("limits", [{"seconds": 0.0}, {"seconds": math.nan}, {"memory_mib": 1}])
def test_limits_in_which_nothing_can_be_rendered_are_refused(limits):
    with pytest.raises(ConfigError, match="--chat-template-"):
        TemplateLimits(**limits)


def test_packs_hold_every_item_once_and_are_well_filled():
    source = random.Random(3)
    for capacity in (10, 100, 1000):
        lengths = [source.randint(1, capacity) for _ in range(400)]
        packs = pack(lengths, capacity)
        assert sorted(item for one in packs for item in one) == list(range(400))
        sums = [sum(lengths[item] for item in one) for one in packs]
        assert max(sums) <= capacity
        assert [one[0] for one in packs] == sorted(one[0] for one in packs)
        # Two half-empty packs would have been one.
        assert sum(2 * size <= capacity for size in sums) <= 1
        assert sum(sums) / len(sums) > 0.85 * capacity
    assert pack([], 5) == []
    assert pack([4, 3, 1, 2], 5) == [[0, 2], [1, 3]]


# --- the tool -----------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, bpe):
    (tmp_path / "model").mkdir()
    bpe.save(str(tmp_path / "model/tokenizer.json"))
    (tmp_path / "model/tokenizer_config.json").write_text(
        json.dumps({"chat_template": CHATML, "eos_token": "</s>"})
    )
    return tmp_path


def run(folder, lines, *flags):
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return preprocess_data.main(
        ["--input", str(folder / "in.jsonl"), "--output-prefix", str(folder / "out"), "--sft",
         "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder / "model"),
         "--workers", "0", *flags]
    )  # fmt: skip


def written(folder):
    tokens = IndexedDataset(str(folder / "out_messages_document"))
    masks = IndexedDataset(str(folder / "out_messages_document_mask"))
    assert masks.dtype == np.uint8
    assert np.array_equal(tokens.sequence_lengths, masks.sequence_lengths)
    assert np.array_equal(tokens.document_indices, masks.document_indices)
    return tokens, masks


def test_tokens_and_mask_are_written_side_by_side(folder, bpe):
    conversations = [talk("Hi", "Hello"), talk("a", "b", "c", "d")]
    shared = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
    assert run(folder, [*({"messages": c} for c in conversations), {"messages": shared}]) == 0
    tokens, masks = written(folder)
    assert len(tokens) == 3
    for at, conversation in enumerate([*conversations, conversations[0]]):
        text = ChatTemplate(CHATML, {}).render(conversation, to_be_answered=False)
        assert bpe.decode(tokens[at].tolist(), skip_special_tokens=False) == text
        learned = bpe.decode(tokens[at][masks[at] == 1].tolist(), skip_special_tokens=False)
        answers = [m["content"] + "<|im_end|>\n" for m in conversation if m["role"] == "assistant"]
        assert learned == "".join(answers)


def test_packs_are_documents_of_whole_conversations(folder, capsys):
    source = random.Random(1)
    conversations = [
        talk("q" * source.randint(1, 60), "a" * source.randint(1, 60)) for _ in "x" * 50
    ]
    long = talk("q", "a" * 500)
    lines = [{"messages": one} for one in [*conversations, long]]
    assert run(folder, lines, "--append-eod") == 0
    alone = {bytes(one.tobytes()) for one in written(folder)[0][:]}
    assert run(folder, lines, "--append-eod", "--pack-length", "200") == 0
    tokens, masks = written(folder)
    packs = np.split(tokens.sequence_lengths, tokens.document_indices[1:-1])
    assert max(int(one.sum()) for one in packs) <= 200
    assert np.mean([int(one.sum()) for one in packs]) > 180
    packed = {bytes(one.tobytes()) for one in tokens[:]}
    assert len(alone - packed) == len(packed - alone) == 1  # the long one was cut
    assert "cut to a pack                  1" in capsys.readouterr().out
    assert all(masks[at][-1] == 1 for at in range(len(masks)))


def test_flags_that_do_not_go_together_are_named_at_once(folder, capsys):
    flags = ["--split-sentences", "--fim-rate", "0.5", "--pack-length", "1"]
    assert run(folder, [], *flags) == 2
    told = capsys.readouterr().err
    for part in ("--sft with --split-sentences", "--sft with --fim-rate", "--pack-length 1"):
        assert part in told


def test_the_workers_and_a_template_file_change_nothing(folder, monkeypatch):
    (folder / "mine.jinja").write_text(CHATML)
    lines = [{"messages": talk(f"question {i}", "answer " * (i % 9))} for i in range(300)]
    assert run(folder, lines, "--pack-length", "64") == 0
    before = (folder / "out_messages_document.bin").read_bytes()
    template = ["--chat-template", str(folder / "mine.jinja")]
    assert run(folder, lines, "--pack-length", "64", "--restart", *template) == 0
    assert (folder / "out_messages_document.bin").read_bytes() == before
    assert job.FORMAT_VERSION == 2


# --- what is no text ----------------------------------------------------------------------------

PRINTS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
TILDE = PRINTS.replace("{{ m.content }}", "{{ m.content ~ '' }}")
TRIMMED = PRINTS.replace("{{ m.content }}", "{{ m.content | trim }}")
PLUS = PRINTS.replace("{{ m.content }}", "{{ '' + m.content }}")
CALLS = PRINTS.replace(
    "{{ m.content }}",
    "{% if m.content is none or not m.content %}{% for c in m.tool_calls %}"
    "<call>{{ c.function.name }}({{ c.function.arguments | tojson }})</call>{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}",
)
PARTS = PRINTS.replace(
    "{{ m.content }}",
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "<{{ p.type }}>{{ p.text }}{% endfor %}{% endif %}",
)
WITH_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}" + CALLS
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": None}}}
CALLING = [
    {"role": "user", "content": "1 + 2?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "3"},
    {"role": "assistant", "content": "It is 3."},
]
IN_PARTS = [
    {
        "role": "user",
        "content": [{"type": "text", "text": "Hi, "}, {"type": "text", "text": "you"}],
    },
    {"role": "assistant", "content": [{"type": "text", "text": "Yes?"}]},
]
JOINED = talk("Hi, you", "Yes?")
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]


def theirs(source, messages, bpe, **options):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, chat_template=source)
    return tokenizer.apply_chat_template(messages, tokenize=False, **options)


@pytest.mark.parametrize("source", [CALLS, WITH_TOOLS])
def test_calls_of_tools_are_written_as_transformers_writes_them(source, bpe):
    tools = TOOLS if source == WITH_TOOLS else None
    segments = ChatTemplate(source, {}).segments(CALLING, tools)
    assert "".join(segments) == theirs(source, CALLING, bpe, tools=tools)
    assert segments[1] == '<call>add({"a": 1, "b": null})</call>'


def test_parts_of_text_are_joined_where_the_template_takes_text_only(bpe):
    for source in (PRINTS, TILDE, TRIMMED, PLUS):
        segments = ChatTemplate(source, {}).segments(IN_PARTS)
        assert "".join(segments) == theirs(source, JOINED, bpe)
        rendered = ChatTemplate(source, {}).render(IN_PARTS, to_be_answered=False)
        assert rendered == theirs(source, JOINED, bpe)
    assert "".join(ChatTemplate(PARTS, {}).segments(IN_PARTS)) == theirs(PARTS, IN_PARTS, bpe)


@pytest.mark.parametrize("source", [PRINTS, TILDE, TRIMMED, PLUS])
def test_null_is_never_learned_as_a_word(folder, capsys, source):
    (folder / "mine.jinja").write_text(source)
    lines = [{"messages": talk("a", "b")}, {"messages": talk("a", "b", "c", None)}]
    assert run(folder, lines, "--chat-template", str(folder / "mine.jinja")) == 1
    told = capsys.readouterr().err
    assert "in.jsonl, line 2: refused by the chat template (message 4: " in told
    if source != PLUS:
        assert "writes null as if it were text" in told


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"messages": "text"}, "'messages' is not a list of messages (found str)"),
        ({"messages": []}, "'messages' is not a list of messages (found list)"),
        ({"messages": [{"role": "user"}, 7]}, "is not a list of messages (message 2)"),
        ({"text": "a"}, "no key 'messages'"),
        ({"messages": [{"role": "user", "content": None}]}, "refused by the chat template"),
        ({"messages": CALLING}, "the template does not write the tool_calls of message 2"),
        (
            {
                "messages": [
                    *talk("a"),
                    {"role": "assistant", "content": None, "function_call": {}},
                    {"role": "assistant", "content": None, "function_call": {"name": "f"}},
                ]
            },
            "refused by the chat template (message 2: ",
        ),
        (
            {"messages": [*talk("a"), {"role": "assistant", "function_call": {"name": "f"}}]},
            "the template does not write the function_call of message 2",
        ),
        ({"messages": talk("a", "b"), "tools": TOOLS}, "the template does not write the tools"),
        ({"messages": talk("a", "b"), "tools": "add"}, "'tools' is no list"),
        ({"messages": talk("a", {"x": 1})}, "not a list of messages (message 2)"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]},
            "a part of a content is no text (message 1: {'type': 'image', 'url': 'x'})",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]},
            "a part of a content is no text (message 1: ",
        ),
    ],
)
def test_what_the_template_does_not_write_is_refused_by_line(folder, capsys, document, message):
    (folder / "mine.jinja").write_text(PRINTS)
    lines = [{"messages": talk("a", "b")}, document]
    flags = ["--chat-template", str(folder / "mine.jinja")]
    assert run(folder, lines, *flags) == 1
    told = capsys.readouterr().err
    assert "in.jsonl, line 2: " in told
    assert message in told
    assert run(folder, lines, *flags, "--skip-bad-lines") == 0
    assert len(written(folder)[0]) == 1


def test_an_object_is_never_written_in_the_spelling_of_python(bpe):
    source = CALLS.replace(" | tojson", "")
    with pytest.raises(BadDocumentError) as caught:
        ChatTemplate(source, {}).segments(CALLING)
    assert caught.value.detail == "message 2: the template writes an object as if it were text"
