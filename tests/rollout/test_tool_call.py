import pytest

from towline.rollout.rewards.tool_call import grade
from towline.storage.errors import DataError

SEARCH = '{"name": "search", "arguments": {"query": "tow line", "limit": 3}}'
WEATHER = '{"name": "weather", "arguments": {"where": ["Oslo", "Bergen"], "metric": true}}'
BOTH = f"[{SEARCH}, {WEATHER}]"


def call(*bodies: str) -> str:
    return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


def searches(arguments: str) -> str:
    return call(f'{{"name": "search", "arguments": {arguments}}}')


@pytest.mark.parametrize(
    ("gold", "completion", "value"),
    [
        (SEARCH, call(SEARCH), 1.0),
        (f"[{SEARCH}]", f"I look it up. {call(SEARCH)} Then I answer.", 1.0),
        (SEARCH, '<tool_call>{"arguments":{"limit":3,"query":"tow line"},"name":"search"}</tool_call>', 1.0),
        (SEARCH, searches('{"query": "tow line", "limit": 3.0}'), 1.0),
        (SEARCH, searches('{"query": "tow line", "limit": 30e-1}'), 1.0),
        (SEARCH, searches('{"query": "tow\\u0020line", "limit": 3}'), 1.0),
        (SEARCH, f"<think>{call(WEATHER)}</think>{call(SEARCH)}", 1.0),
        (BOTH, call(SEARCH, WEATHER), 1.0),
        (BOTH, call(WEATHER, SEARCH), 1.0),
        ("[]", "I know that.", 1.0),
        ("[]", call(SEARCH), 0.0),
        (SEARCH, "I know that.", 0.0),
        (SEARCH, SEARCH, 0.0),
        (SEARCH, call(SEARCH, SEARCH), 0.0),
        (f"[{SEARCH}, {SEARCH}]", call(SEARCH, WEATHER), 0.0),
        (f"[{SEARCH}, {SEARCH}]", call(SEARCH, SEARCH), 1.0),
        (BOTH, call(SEARCH), 0.0),
        (SEARCH, searches('{"query": "tow line", "limit": 4}'), 0.0),
        (SEARCH, searches('{"query": "tow line", "limit": "3"}'), 0.0),
        (SEARCH, searches('{"query": "Tow line", "limit": 3}'), 0.0),
        (SEARCH, searches('{"query": "tow line"}'), 0.0),
        (SEARCH, searches('{"query": "tow line", "limit": 3, "page": 1}'), 0.0),
        (SEARCH, call(SEARCH.replace("search", "find")), 0.0),
        (WEATHER, call(WEATHER.replace("true", "1")), 0.0),
        (WEATHER, call(WEATHER.replace("true", '"true"')), 0.0),
        (WEATHER, call(WEATHER.replace('"Oslo", "Bergen"', '"Bergen", "Oslo"')), 0.0),
        (SEARCH, f"<think>{call(SEARCH)}</think> Done.", 0.0),
        (SEARCH, f"<think>{call(SEARCH)}", 0.0),
    ],
)
def test_the_calls_are_the_gold_ones(gold: str, completion: str, value: float) -> None:
    assert grade(completion, gold).value == value


@pytest.mark.parametrize("other", ["1", "1.0"])
def test_true_and_one_are_not_mistaken_for_each_other(other: str) -> None:
    gold = '[{"name": "f", "arguments": {"x": 1}}, {"name": "f", "arguments": {"x": true}}]'
    bodies = ['{"name": "f", "arguments": {"x": true}}', f'{{"name": "f", "arguments": {{"x": {other}}}}}']
    assert grade(call(*bodies), gold).value == grade(call(*reversed(bodies)), gold).value == 1.0
    assert grade(call(bodies[0], bodies[0]), gold).value == 0.0


@pytest.mark.parametrize(
    ("completion", "reason"),
    [
        (f"<tool_call>{SEARCH}", "not closed"),
        (f"<tool_call><tool_call>{SEARCH}</tool_call>", "not closed"),
        (f"{call(SEARCH)}</tool_call>", "without its <tool_call>"),
        (f"</tool_call>{call(SEARCH)}", "without its <tool_call>"),
        (call("search(tow line)"), "no JSON: Expecting value at 1"),
        (call(SEARCH + SEARCH), "no JSON: Extra data"),
        (call(SEARCH.replace('"', "'")), "no JSON"),
        (call(""), "no JSON"),
        (call(f"[{SEARCH}]"), "no call"),
        (call("null"), "no call"),
        (call('{"name": "search"}'), "has the keys name; expected name, arguments"),
        (call('{"name": "search", "arguments": "{}"}'), "its arguments are an object"),
        (call('{"name": 1, "arguments": {}}'), "name is a string"),
        (call('{"name": "search", "arguments": {}, "id": 1}'), "has the keys name, arguments, id"),
        (searches('{"query": "a", "query": "tow line", "limit": 3}'), "a key comes twice"),
        (call('{"name": "x", "name": "search", "arguments": {}}'), "a key comes twice"),
        (searches('{"limit": NaN}'), "no JSON: NaN"),
        (searches('{"limit": 1e99999999999999999999}'), "a number beyond every size"),
        (searches("[" * 100_000), "nested without end"),
        (call(SEARCH, "{"), "no JSON"),
    ],
)
def test_what_is_no_call_makes_the_completion_wrong_and_says_why(completion: str, reason: str) -> None:
    verdict = grade(completion, SEARCH)
    assert (verdict.value, reason in verdict.detail) == (0.0, True), verdict.detail


@pytest.mark.parametrize(
    "gold",
    ["", "search", "{}", "7", "null", '{"name": "f"}', '{"name": "f", "arguments": []}', "[[]]",
     '{"name": "f", "arguments": {"a": 1, "a": 2}}', '{"name": "f", "arguments": {"a": NaN}}', "[" * 100_000],
)  # fmt: skip
def test_a_gold_answer_that_is_no_call_is_an_error_in_the_data(gold: str) -> None:
    with pytest.raises(DataError, match="gold answer"):
        grade(call(SEARCH), gold)


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "piece", ["<tool_call>", "</tool_call>", call(SEARCH), "<tool_call>{", "<think>", '{"a":', "\ud800"]
)
def test_a_megabyte_of_anything_is_soon_judged(piece: str) -> None:
    many = piece * (1_000_000 // len(piece))
    assert grade(many, SEARCH).value == 0.0
    assert grade(call(many), SEARCH).value == 0.0


@pytest.mark.timeout(20)
@pytest.mark.parametrize("number", ["9" * 1_000_000, "1e999999999", "1e-999999999", "0." + "0" * 1_000_000 + "1"])
def test_numbers_of_any_size_are_soon_compared(number: str) -> None:
    gold = searches(f'{{"limit": {number}}}').removeprefix("<tool_call>").removesuffix("</tool_call>")
    assert grade(searches(f'{{"limit": {number}}}'), gold).value == 1.0
    assert grade(searches('{"limit": 3}'), gold).value == 0.0
