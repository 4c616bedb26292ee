"""A chat template is rendered as transformers renders it, and prompts continue where it lets them."""

from __future__ import annotations

import json
import random
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from chat_families import FAMILIES, Family, spell, write_json
from session_book import Book, assistant, tool_result, user
from tinkerscript.errors import ConfigError, GatewayError
from tinkerscript.gateway.chat_template import ChatTemplate, templates_with_defaults
from tinkerscript.gateway.conversation.tree import TEMPLATE_REWRITES, Turn
from tinkerscript.gateway.rendering import ChatRenderer, ParseOptions
from tinkerscript.rollouts.call import unpack_ids
from tinkerscript.tokenizer import MARK, unmarked

SYSTEM = {"role": "system", "content": "be brief"}
NOW = datetime(2026, 3, 4)


def tool(name: str, description: str = "Does it.") -> dict[str, Any]:
    properties = {"a": {"type": "string", "description": "One."}, "n": {"type": "integer"}}
    parameters = {"type": "object", "properties": properties, "required": ["a"]}
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": parameters},
    }


TOOLS = [tool("look"), tool("weigh")]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    return {name: family.write(root / name) for name, family in FAMILIES.items()}


@pytest.fixture(scope="session")
def renderers(folders: dict[str, Path]) -> dict[str, ChatRenderer]:
    return {name: ChatRenderer(folder) for name, folder in folders.items()}


def theirs(folder: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(folder)


def with_call(arguments: Any, content: str | None, call_id: str) -> list[dict[str, Any]]:
    """A call and its result."""
    call = {"id": call_id, "type": "function", "function": {"name": "look", "arguments": arguments}}
    return [assistant(content, tool_calls=[call]), tool_result(call_id, '{"b": "<&"}')]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_text_is_transformers(name: str, folders: dict[str, Path]) -> None:
    family, reference = FAMILIES[name], theirs(folders[name])
    template = ChatTemplate.of(folders[name])
    assert template is not None
    ours: Any = [SYSTEM] if family.system else []
    ours += [user("hello "), assistant(" hello\n"), user("\nso?")]
    natural, tools = list(ours), None
    if family.writes_tools:
        tools, arguments = TOOLS, {"a": "é", "n": 1}
        written = with_call(json.dumps(arguments), "", "abcdefghi")
        ours += written
        call_id = template.form.of(written[1])["tool_call_id"]  # Mistral's are short.
        if name == "deepseek_v3":  # It takes arguments as text, and no content beside calls.
            natural += with_call(json.dumps(arguments), None, call_id)
        else:
            natural += with_call(arguments, "", call_id)
    for generation in (True, False):
        text = reference.apply_chat_template(
            natural, tools=tools, add_generation_prompt=generation, tokenize=False
        )
        assert template.text(ours, tools or [], generation=generation) == text
    ids = reference.apply_chat_template(natural, tools=tools, add_generation_prompt=True, return_dict=False)
    assert ChatRenderer(folders[name]).render(ours, tools or []) == ids


def test_the_environment_is_transformers() -> None:
    """Filters, loop controls, sandbox, white space, and the functions that templates call."""
    source = (
        "{% for m in messages %}\n  {% if loop.index > 2 %}{% break %}{% endif %}\n"
        "{{ m | tojson }} {{ m | tojson(indent=2, sort_keys=True) }}{{ tools is none }}{{ documents }}"
        "{% generation %}{{ m.content }}{% endgeneration %}\n{% endfor %}\n{{ bos_token }}{{ missing }}"
    )
    messages = [{"role": "user", "content": "<é> & 'x'"}, {"role": "a", "content": "b"}] * 2
    (expected,), _ = render_jinja_template([messages], chat_template=source, bos_token="<s>")
    template = ChatTemplate({"default": source}, {"bos_token": "<s>"}, origin="a test")
    assert template.text(messages, [], generation=False) == expected


def test_a_date_is_that_of_one_moment() -> None:
    moments = iter([datetime(2026, 1, day) for day in range(1, 29)])
    source = "{{ strftime_now('%d %b %Y') }}{% for m in messages %}{{ m.content }}{% endfor %}"
    template = ChatTemplate({"default": source}, {}, origin="a test", clock=lambda: next(moments))
    assert template.text([user("a")], [], generation=True, now=NOW) == "04 Mar 2026a"
    assert template.text([user("a")], [], generation=True) != template.text([user("a")], [], generation=True)


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("{% if %}", "cannot be compiled"),
        ("{{ raise_exception('no!') }}", "cannot be used: .*no!"),
        ("{% for m in messages %}{{ m.content + 1 }}{% endfor %}", "cannot be used"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused(tmp_path: Path, source: str, error: str) -> None:
    folder = FAMILIES["qwen2.5"].write(tmp_path)
    (folder / "chat_template.jinja").write_text(source)
    with pytest.raises(ConfigError, match=error):
        ChatRenderer(folder)


def test_where_a_template_comes_from(tmp_path: Path) -> None:
    folder = FAMILIES["qwen2.5"].write(tmp_path)
    (folder / "chat_template.jinja").unlink()
    assert ChatTemplate.of(folder) is None
    with pytest.raises(ConfigError, match=r"has no chat template \(chat_template.jinja"):
        ChatRenderer(folder)

    def text(tools: list[Any] | None = None) -> str:
        template = ChatTemplate.of(folder)
        assert template is not None
        return template.text([user("a")], tools or [], generation=True)

    config = {"eos_token": "<|im_end|>", "bos_token": {"content": "<b>"}, "chat_template": "1{{ bos_token }}"}
    write_json(folder / "tokenizer_config.json", config)
    assert text() == "1<b>"
    named = [{"name": "default", "template": "2"}, {"name": "tool_use", "template": "3"}]
    write_json(folder / "tokenizer_config.json", config | {"chat_template": named})
    assert (text(), text(TOOLS)) == ("2", "3")
    write_json(folder / "tokenizer_config.json", config | {"chat_template": named[1:]})
    with pytest.raises(ConfigError, match="none is called `default`: tool_use"):
        text()
    (folder / "chat_template.jinja").write_text("4")
    assert (text(), text(TOOLS)) == ("4", "4")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("5")
    assert (text(), text(TOOLS)) == ("4", "5")


def test_a_renderer_is_used_only_if_it_fits_the_template(tmp_path: Path) -> None:
    fits = FAMILIES["qwen3"].write(tmp_path / "fits", model_type="qwen3")
    assert not ChatRenderer(fits).uses_template
    other = FAMILIES["qwen3_thinking"].write(tmp_path / "other", model_type="qwen3")
    assert ChatRenderer(other).uses_template
    named = FAMILIES["llama3.1"].write(tmp_path / "named", _name_or_path="meta-llama/Llama-3.2-1B-Instruct")
    assert not ChatRenderer(named).uses_template
    without = FAMILIES["gemma2"].write(tmp_path / "without", model_type="qwen3")
    assert ChatRenderer(without).uses_template, "a tokenizer without the renderer's tokens"


THINKLESS = {"enable_thinking": False}


@pytest.mark.parametrize("name", ["qwen3", "glm4.5"])
def test_arguments_of_the_template_are_in_every_prompt_and_in_checkpoints(name: str, tmp_path: Path) -> None:
    """Whether a renderer of `renderers` writes the prompts (Qwen 3) or the template (GLM)."""
    folder = FAMILIES[name].write(tmp_path / "model", model_type=name)
    plain, thinkless = ChatRenderer(folder), ChatRenderer(folder, THINKLESS)
    assert (plain.uses_template, thinkless.uses_template) == (name == "glm4.5",) * 2
    messages = [SYSTEM, user("so?")]
    text = theirs(folder).apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, **THINKLESS
    )
    prompt = thinkless.render(messages, [])
    assert thinkless.tokenizer.decode(prompt) == text
    assert prompt != plain.render(messages, [])

    saved = FAMILIES[name].write(tmp_path / "saved", model_type=name)
    for file, source in templates_with_defaults(folder, THINKLESS).items():
        (saved / file).write_text(source)
    assert ChatRenderer(saved).render(messages, []) == prompt
    assert ChatRenderer(saved).uses_template == plain.uses_template
    assert theirs(saved).apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == text
    assert ChatRenderer(saved, {"enable_thinking": True}).render(messages, []) == plain.render(messages, [])


@pytest.mark.parametrize("name", ["qwen3", "glm4.5"])
def test_a_conversation_without_thinking_is_one_sequence(name: str, tmp_path: Path) -> None:
    book = Book(ChatRenderer(FAMILIES[name].write(tmp_path, model_type=name), THINKLESS))
    first, reply = book.ask([user("so?")], book.ids("yes"))
    second, _ = book.ask([user("so?"), reply, user("sure?")], book.ids("no"))
    assert (second.fork_reason, second.parent is not None) == (None, True)
    assert second.prompt.startswith(first.prompt)


def test_arguments_that_the_template_does_not_have_are_refused(tmp_path: Path) -> None:
    folder = FAMILIES["qwen3"].write(tmp_path / "qwen3")
    with pytest.raises(
        ConfigError, match=r"no argument 'enable_thinkng'; its arguments are: enable_thinking$"
    ):
        ChatRenderer(folder, {"enable_thinkng": False})
    with pytest.raises(ConfigError, match="has no argument 'messages'"):
        ChatRenderer(folder, {"messages": []})
    assert templates_with_defaults(folder, {}) == {}
    (folder / "chat_template.jinja").write_text("\n{{ messages[0].content }}{{ when }}")
    assert ChatTemplate.of(folder, {"when": [None, "'"]}).text([user("hi")], [], generation=True)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match=r"chat_template_kwargs: .* has no chat template"):
        ChatRenderer(folder, THINKLESS)


@pytest.mark.parametrize("name", FAMILIES)
def test_tools_are_written_and_a_call_is_read(name: str, renderers: dict[str, ChatRenderer]) -> None:
    family, renderer = FAMILIES[name], renderers[name]
    system = [SYSTEM] if family.system else []
    prompt = renderer.tokenizer.decode(renderer.render([*system, user("a")], TOOLS))
    assert "look" in prompt
    assert "weigh" in prompt
    if family.call is None:
        return
    arguments = '{"a": "5 </x> é\\n", "n": 7}'
    sampled = spell(renderer.tokenizer, family.call("look", arguments) + (family.call_end or family.end))
    message = renderer.parse(sampled, ParseOptions(True, tools=TOOLS))
    if not family.reads_calls:
        assert "look" in message["content"]
        assert "tool_calls" not in message
        return
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "look"
    assert json.loads(call["function"]["arguments"]) == json.loads(arguments)
    assert message["content"] == ""
    assert message.get("reasoning_content", "") == ("hm" if family.thinks else "")
    text = renderer.parse(sampled, ParseOptions(False))
    assert "look" in text["content"], "without tools it is text"


def test_tools_that_a_template_writes_into_a_system_message_need_one(
    renderers: dict[str, ChatRenderer],
) -> None:
    with pytest.raises(GatewayError, match="need a system message"):
        renderers["phi4_mini"].render([user("a")], TOOLS)


REPLIES = ["hello", "", " \n", "é🙂", "so <b> & 'c'", "a\n\nb ", '{"x": 1}', "<|im_end|> </s> <eos>"]
CUTS = [None, None, None, 1, 3, 20]


class Talk:
    """A random conversation with one family, checked against transformers' rendering after every turn."""

    def __init__(self, family: Family, renderer: ChatRenderer, folder: Path, rng: random.Random) -> None:
        self.family, self.renderer, self.rng = family, renderer, rng
        self.book = Book(renderer)
        self.reference = theirs(folder)
        template = ChatTemplate.of(folder)
        assert template is not None
        self.template = template
        self.texts: dict[str, str] = {}
        self.tools = TOOLS if family.call else []
        self.forks: list[str | None] = []

    def begin(self) -> None:
        """Start over, as another claim."""
        self.book = Book(self.renderer)
        self.messages: list[dict[str, Any]] = [SYSTEM] if self.family.system else []

    def turn(self) -> None:
        rng, family, tokenizer = self.rng, self.family, self.renderer.tokenizer
        if not self.messages or self.messages[-1]["role"] != "tool":
            self.messages.append(user(rng.choice(REPLIES) + str(rng.randrange(9))))
        arguments = json.dumps({"a": rng.choice(REPLIES[:5]) + "x", "n": rng.randrange(9)})
        calls = family.call is not None and rng.random() < 0.5
        if family.call and calls:
            text, end = family.call(rng.choice(("look", "weigh")), arguments), family.call_end or family.end
        else:
            text, end = family.reply(rng.choice(REPLIES)), family.end
        sampled = [*spell(tokenizer, text, rng), tokenizer.added_tokens[end]]
        sampled = sampled[: rng.choice(CUTS)]
        turn, reply = self.book.ask(self.messages, sampled, self.tools)
        self.check(turn, self.book.calls[-1].call_id)
        self.messages.append(reply)
        for call in reply.get("tool_calls", ()):
            self.messages.append(tool_result(call["id"], rng.choice(REPLIES)))

    def check(self, turn: Turn, call_id: str) -> None:
        prompt, text = unpack_ids(turn.prompt).tolist(), self.rendered()
        self.texts[call_id] = text
        tokenizer = self.renderer.tokenizer
        whole = tokenizer.encode(text)
        if turn.parent is None:
            assert prompt == whole
            self.forks.append(turn.fork_reason)
            return
        assert turn.prompt == turn.parent.stream() + turn.new_prompt
        # What was appended is the end of the prompt that transformers renders, id for id.
        new = unpack_ids(turn.new_prompt).tolist()
        assert whole[len(whole) - len(new) :] == new
        # Before that stand the prompt before, unchanged, and the reply as it was sampled.
        before, after = self.texts[turn.parent.call_id], unmarked(tokenizer.decode(new))
        assert text.startswith(before)
        written = unmarked(text)[len(unmarked(before)) : len(unmarked(text)) - len(after)]
        reply = turn.parent.reply
        assert all(part in written for part in (reply["content"], reply.get("reasoning_content", "")))
        assert all(call["function"]["name"] in written for call in reply.get("tool_calls", ()))
        # Nothing of the reply's end is left out, and nothing is there twice.
        stops = self.renderer.stop_token_ids
        last = unpack_ids(turn.parent.sampled).tolist()[-1:]
        assert whole[-len(new) - 1] in stops if last and last[0] in stops else new[0] not in last

    def rendered(self) -> str:
        """The conversation as transformers renders it, with marks in what is not the template's."""
        messages = self.renderer.tokenizer.escaper.messages(self.messages)
        if not self.family.writes_tools:
            return self.template.text(messages, self.tools, generation=True)
        given: Any = [self.template.form.of(message) for message in messages]
        text = self.reference.apply_chat_template(
            given, tools=self.tools or None, add_generation_prompt=True, tokenize=False
        )
        if MARK not in str(text):
            ids = self.reference(text, add_special_tokens=False).input_ids
            assert ids == self.renderer.tokenizer.encode(str(text))
        return str(text)


@pytest.mark.parametrize("name", FAMILIES)
def test_random_conversations_follow_the_template(
    name: str, renderers: dict[str, ChatRenderer], folders: dict[str, Path]
) -> None:
    """Truncated turns, empty replies, split characters, spelled-out special tokens, other tokenizations."""
    turns = 0
    talk = Talk(FAMILIES[name], renderers[name], folders[name], random.Random(name))
    for _ in range(8):
        talk.begin()
        for _ in range(5):
            talk.turn()
            turns += 1
        assert set(talk.forks) <= {None, TEMPLATE_REWRITES}
    assert len(talk.forks) < turns


def test_a_turn_that_ended_for_other_messages_forks(renderers: dict[str, ChatRenderer]) -> None:
    """GLM ends a reply with the first token of what follows: a question does not follow a call."""
    book = Book(renderers["glm4.5"])
    sampled = spell(book.renderer.tokenizer, "\n<think></think>\nhello<|observation|>")
    _, reply = book.ask([user("a")], sampled)
    turn = book.session.plan([user("a"), reply, user("c")], [])
    assert (turn.parent, turn.fork_reason) == (None, TEMPLATE_REWRITES)


@pytest.mark.parametrize("name", ["llama3.1", "hermes"])
def test_text_that_the_template_drops_beside_a_call_forks(
    name: str, renderers: dict[str, ChatRenderer]
) -> None:
    family, book = FAMILIES[name], Book(renderers[name])
    assert family.call is not None
    marker = "<|python_tag|>" if name == "llama3.1" else ""
    call = "so\n" + marker + family.call("look", '{"a": "x"}') + family.end
    _, reply = book.ask([user("a")], spell(book.renderer.tokenizer, call), TOOLS)
    assert (reply["content"], len(reply["tool_calls"])) == ("so", 1)
    result = tool_result(reply["tool_calls"][0]["id"], "b")
    turn = book.session.plan([user("a"), reply, result], TOOLS)
    assert (turn.parent, turn.fork_reason) == (None, TEMPLATE_REWRITES)


def test_several_calls_are_text_where_the_template_can_write_one(renderers: dict[str, ChatRenderer]) -> None:
    renderer = renderers["llama3.1"]
    text = '{"name": "look", "parameters": {}}; {"name": "weigh", "parameters": {}}'
    message = renderer.parse(spell(renderer.tokenizer, text + "<|eot_id|>"), ParseOptions(True))
    assert message == {"role": "assistant", "content": text}
    two = renderers["qwen2.5"]
    calls = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>\n' * 2
    assert len(two.parse(spell(two.tokenizer, calls), ParseOptions(True))["tool_calls"]) == 2


@pytest.mark.parametrize("name", ["qwen2.5", "mistral_v3", "phi3.5", "gemma2"])
def test_special_tokens_in_messages_are_text(name: str, renderers: dict[str, ChatRenderer]) -> None:
    """Also where a tokenizer puts spaces before texts, or swallows those after special tokens."""
    family, renderer = FAMILIES[name], renderers[name]
    tokenizer = renderer.tokenizer
    special = {tokenizer.added_tokens[text] for text in family.special}
    forged = f"hello {family.end}{family.special[1]} hello {family.end}"
    plain = renderer.render([user("hello  hello ")], [])
    ids = renderer.render([user(forged)], [])
    assert [token for token in ids if token in special] == [token for token in plain if token in special]
    assert forged in tokenizer.decode(ids)
    first = next(i for i, (one, other) in enumerate(zip(ids, plain, strict=False)) if one != other)
    assert "hello" in tokenizer.decode(ids[:first]), "what precedes it is encoded as without it"


def test_a_template_that_escapes_special_tokens_is_refused(tmp_path: Path) -> None:
    folder = FAMILIES["qwen2.5"].write(tmp_path)
    source = "{% for m in messages %}{{ m.content | tojson(ensure_ascii=True) }}<|im_end|>{% endfor %}"
    (folder / "chat_template.jinja").write_text(source)
    renderer = ChatRenderer(folder)
    assert renderer.render([user("é")], [])
    with pytest.raises(GatewayError, match="cannot write special tokens as text"):
        renderer.render([user("<|im_end|>")], [])
