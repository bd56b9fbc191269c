"""The seeded instruction corpus of the embedded target: short conversations with a known answer.

Each task is a function `rng -> [Turn, ...]`; its name is the kind that reports use. Prompts vary in wording, names
and numbers; the answer follows from the prompt, mostly step by step, so that a model of a few million parameters
can learn it and a drafter can guess the easy stretches between the values that have to be worked out.

`conversations(seed, count)` is the training data, `prompts(seed, count)` the user turns alone.
"""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import tiny_words as words


@dataclass(frozen=True)
class Turn:
    """One user turn with its reference answer; `key` is the text that a correct answer must contain ("" = free)."""

    user: str
    answer: str
    key: str = ""


@dataclass(frozen=True)
class Conversation:
    """The turns of one conversation, and the task (`kind`) that made them."""

    kind: str
    turns: tuple[Turn, ...]


def _made_up(rng: random.Random) -> str:
    """A word nobody has seen: it can only be copied from the prompt."""
    return "".join(rng.sample(words.SYLLABLES, rng.randint(2, 3)))


def _name(rng: random.Random) -> str:
    return rng.choice(words.NAMES) if rng.random() < 0.8 else _made_up(rng).capitalize()


def _joined(items: list[str]) -> str:
    return f"{', '.join(items[:-1])} and {items[-1]}"


def _numbers(rng: random.Random, count: int, low: int = 2, high: int = 60) -> list[int]:
    return rng.sample(range(low, high), count)


def gain_and_loss(rng: random.Random) -> list[Turn]:
    name, other, things = _name(rng), _name(rng), rng.choice(words.OBJECTS)
    start, more = rng.randint(5, 50), rng.randint(2, 40)
    less = rng.randint(2, min(start + more - 1, 40))
    user = rng.choice(
        (
            f"{name} has {start} {things}. {name} gets {more} more and gives {less} to {other}. "
            f"How many {things} does {name} have now?",
            f"{name} had {start} {things}, bought {more} and lost {less}. How many are left?",
            f"How many {things} does {name} have after starting with {start}, finding {more} and "
            f"selling {less} to {other}?",
        )
    )
    total, left = start + more, start + more - less
    answer = (
        f"{name} starts with {start} {things}.\nThen {name} gets {more} more: {start} + {more} = {total}.\n"
        f"After that {less} go away: {total} - {less} = {left}.\nAnswer: {left} {things}."
    )
    return [Turn(user, answer, f"Answer: {left} ")]


def boxes_of_things(rng: random.Random) -> list[Turn]:
    name, things = _name(rng), rng.choice(words.OBJECTS)
    boxes, each, extra = rng.randint(2, 9), rng.randint(2, 9), rng.randint(2, 20)
    user = rng.choice(
        (
            f"{name} packs {boxes} boxes with {each} {things} each and keeps {extra} {things} in a bag. "
            f"How many {things} are there in all?",
            f"There are {boxes} shelves with {each} {things} on each, and {extra} more on the floor. "
            f"Find the total for {name}.",
        )
    )
    product = boxes * each
    answer = (
        f"First multiply: {boxes} x {each} = {product} {things}.\nThen add the other {extra}: "
        f"{product} + {extra} = {product + extra}.\nAnswer: {product + extra} {things}."
    )
    return [Turn(user, answer, f"Answer: {product + extra} ")]


def chain_of_sums(rng: random.Random) -> list[Turn]:
    value, text, steps = rng.randint(5, 60), "", []
    start = value
    for _ in range(rng.randint(2, 4)):
        plus, amount = rng.random() < 0.6, rng.randint(2, 30)
        plus = plus or amount >= value
        sign, after = ("+", value + amount) if plus else ("-", value - amount)
        steps.append(f"{value} {sign} {amount} = {after}")
        text, value = f"{text} {sign} {amount}", after
    user = rng.choice(("Compute {}.", "What is {}?", "Work out {} step by step.")).format(f"{start}{text}")
    lines = "\n".join(f"Step {i}: {step}" for i, step in enumerate(steps, 1))
    return [Turn(user, f"{lines}\nAnswer: {value}.", f"Answer: {value}.")]


def comparing(rng: random.Random) -> list[Turn]:
    names = rng.sample(words.NAMES, 3)
    ages = _numbers(rng, 3, 8, 90)
    facts = ", ".join(f"{n} is {a}" for n, a in zip(names, ages, strict=True))
    oldest = rng.random() < 0.5
    word, pick = ("oldest", max) if oldest else ("youngest", min)
    age = pick(ages)
    winner = names[ages.index(age)]
    gap = max(ages) - min(ages)
    user = rng.choice((f"{facts}. Who is the {word}?", f"Who is the {word} if {facts}?"))
    answer = (
        f"The ages are {', '.join(map(str, sorted(ages)))} in order.\nThe {word} is {winner}, who is {age}.\n"
        f"The difference between the oldest and the youngest is {max(ages)} - {min(ages)} = {gap} years."
    )
    return [Turn(user, answer, f"The {word} is {winner}, who is {age}.")]


def sorting_numbers(rng: random.Random) -> list[Turn]:
    values = _numbers(rng, rng.randint(3, 6), 1, 100)
    down = rng.random() < 0.4
    order = "from largest to smallest" if down else "from smallest to largest"
    word = "largest" if down else "smallest"
    ranked = sorted(values, reverse=down)
    user = rng.choice(("Sort {} {}.", "Put the numbers {} in order {}.", "Order {} {}.")).format(
        ", ".join(map(str, values)), order
    )
    lines, left = [], list(values)
    for value in ranked[:-1]:
        left.remove(value)
        lines.append(f"The {word} is {value}, left are {', '.join(map(str, left))}.")
    result = ", ".join(map(str, ranked))
    return [Turn(user, "\n".join([*lines, f"Sorted: {result}"]), f"Sorted: {result}")]


def sorting_words(rng: random.Random) -> list[Turn]:
    items = rng.sample(rng.choice((words.ANIMALS, words.OBJECTS, words.COLOURS, words.NAMES)), rng.randint(3, 6))
    user = rng.choice(
        ("Sort these words: {}.", "Put {} in alphabetical order.", "Which order do {} have in a dictionary?")
    )
    ranked = sorted(items)
    answer = (
        f"In alphabetical order the words are {_joined(ranked)}.\n"
        f"The first word is {ranked[0]} and the last word is {ranked[-1]}."
    )
    return [Turn(user.format(", ".join(items)), answer, f"words are {_joined(ranked)}.")]


def reversing(rng: random.Random) -> list[Turn]:
    pool = rng.choice((words.ANIMALS, words.OBJECTS, words.CITIES, words.VERBS))
    items = rng.sample(pool, rng.randint(3, 7))
    back = items[::-1]
    user = rng.choice(("Reverse this list: {}.", "Write {} backwards, one on a line.", "Turn the list {} around."))
    lines = "\n".join(f"{i}. {item}" for i, item in enumerate(back, 1))
    answer = f"Here is the list in reverse order:\n{lines}\nIt now starts with {back[0]} and ends with {back[-1]}."
    return [Turn(user.format(", ".join(items)), answer, lines)]


def spelling(rng: random.Random) -> list[Turn]:
    word = rng.choice((rng.choice(words.ANIMALS), rng.choice(words.CITIES).lower(), _made_up(rng)))
    user = rng.choice((f"Spell {word} and spell it backwards.", f"Which letters are in {word}? Then reverse them."))
    back = word[::-1]
    answer = (
        f"The word {word} has {len(word)} letters: {'-'.join(word)}.\nBackwards they are {'-'.join(back)}.\n"
        f"It begins with {word[0]} and ends with {word[-1]}."
    )
    return [Turn(user, answer, f"Backwards they are {'-'.join(back)}.")]


def json_object(rng: random.Random) -> list[Turn]:
    name, age = _name(rng), rng.randint(18, 80)
    city, job, hobby = rng.choice(words.CITIES), rng.choice(words.JOBS), rng.choice(words.HOBBIES)
    fields: dict[str, object] = {"name": name, "age": age, "city": city, "job": job, "hobby": hobby}
    sentence = f"{name} is a {age} year old {job} from {city} who likes {hobby}."
    wanted = rng.sample(list(fields), rng.randint(3, 5))
    if rng.random() < 0.4:
        user = rng.choice((f"Write this as JSON: {sentence}", f"{sentence} Make a JSON object of it."))
        wanted = list(fields)
    else:
        user = f"{sentence} Give {_joined(wanted)} as JSON."
    text = json.dumps({field: fields[field] for field in wanted}, indent=2)
    return [Turn(user, f"```json\n{text}\n```", text)]


def json_table(rng: random.Random) -> list[Turn]:
    things = rng.sample(words.OBJECTS, rng.randint(2, 3))
    counts = _numbers(rng, len(things), 2, 40)
    parts = _joined([f"{c} {t}" for c, t in zip(counts, things, strict=True)])
    place = rng.choice(words.PLACES)
    user = rng.choice((f"In the {place} there are {parts}. Answer in JSON.", f"JSON list for the {place}: {parts}."))
    rows = [{"item": t, "count": c} for c, t in zip(counts, things, strict=True)]
    lines = ",\n".join(f"    {json.dumps(row)}" for row in rows)
    text = f'{{\n  "place": "{place}",\n  "items": [\n{lines}\n  ],\n  "total": {sum(counts)}\n}}'
    return [Turn(user, f"```json\n{text}\n```", text)]


def python_list_code(rng: random.Random) -> list[Turn]:
    name = f"{rng.choice(words.VERBS)}_{rng.choice(words.OBJECTS)}"
    item = rng.choice(("x", "n", "item", "value"))
    limit, factor = rng.randint(2, 30), rng.randint(2, 9)
    asks, test = rng.choice(
        (
            (f"larger than {limit}", f"{item} > {limit}"),
            (f"smaller than {limit}", f"{item} < {limit}"),
            ("even", f"{item} % 2 == 0"),
            ("odd", f"{item} % 2 == 1"),
        )
    )
    act, expression = rng.choice(
        (
            (f"times {factor}", f"{item} * {factor}"),
            (f"plus {factor}", f"{item} + {factor}"),
            ("squared", f"{item} * {item}"),
        )
    )
    user = rng.choice(
        (
            f"Write a Python function {name} that returns the numbers that are {asks}, {act}. Call the item {item}.",
            f"Python: {name}(numbers) keeps each {item} that is {asks} and gives it {act}.",
        )
    )
    answer = (
        f"```python\ndef {name}(numbers):\n    result = []\n    for {item} in numbers:\n        if {test}:\n"
        f"            result.append({expression})\n    return result\n```\n"
        f"The function {name} keeps the numbers that are {asks} and gives each of them {act}."
    )
    return [Turn(user, answer, f"        if {test}:\n            result.append({expression})\n")]


def python_sum_code(rng: random.Random) -> list[Turn]:
    first, second = rng.sample("abcdghkmpqrstuvwxyz", 2)
    name, sign, word = rng.choice((("add", "+", "sum"), ("subtract", "-", "difference"), ("multiply", "*", "product")))
    left, right = rng.randint(10, 40), rng.randint(2, 9)
    value = {"+": left + right, "-": left - right, "*": left * right}[sign]
    user = rng.choice(
        (
            f"Write a function that returns the {word} of {first} and {second}, and call it with {left} and {right}.",
            f"Python code for the {word} of {first} and {second}; try it on {left} and {right}.",
        )
    )
    answer = (
        f"```python\ndef {name}({first}, {second}):\n    return {first} {sign} {second}\n\n"
        f"print({name}({left}, {right}))\n```\nThis prints {value}, because {left} {sign} {right} is {value}."
    )
    return [Turn(user, answer, f"This prints {value},")]


def bullet_list(rng: random.Random) -> list[Turn]:
    things = rng.sample(words.OBJECTS, rng.randint(3, 5))
    prices = _numbers(rng, len(things), 2, 30)
    parts = ", ".join(f"{t} {p}" for t, p in zip(things, prices, strict=True))
    user = (
        rng.choice((f"Make a price list: {parts}.", f"Write these prices as a list: {parts}.")) + " Name the cheapest."
    )
    lines = "\n".join(f"- {t.capitalize()}: {p} coins" for t, p in zip(things, prices, strict=True))
    low = min(prices)
    answer = f"Price list:\n{lines}\nThe cheapest are the {things[prices.index(low)]} at {low} coins."
    return [Turn(user, answer, answer.splitlines()[-1])]


def day_plan(rng: random.Random) -> list[Turn]:
    name, plan = _name(rng), rng.sample(words.ACTIVITIES, rng.randint(3, 4))
    hours = _numbers(rng, len(plan), 7, 22)
    parts = ", ".join(f"{activity} at {hour}" for activity, hour in zip(plan, hours, strict=True))
    user = rng.choice((f"Plan the day of {name}: {parts}.", f"{name} has {parts}. Write the plan in order of time."))
    ranked = sorted(zip(hours, plan, strict=True))
    lines = "\n".join(f"{hour}:00 - {activity}" for hour, activity in ranked)
    answer = (
        f"Here is the plan for {name}:\n{lines}\nThe day of {name} starts at {ranked[0][0]}:00 with {ranked[0][1]}."
    )
    return [Turn(user, answer, lines)]


def replacing(rng: random.Random) -> list[Turn]:
    first, second, new = rng.sample(words.ANIMALS, 3)
    colour, place, name = rng.choice(words.COLOURS), rng.choice(words.PLACES), _name(rng)
    sentence = rng.choice(
        (
            "The {} {} and the {} met {} in the {}.",
            "A {} {} chased the {} while {} ran to the {}.",
            "One {} {} and one {} belong to {} from the {}.",
        )
    )
    old = rng.choice((first, second))
    before = sentence.format(colour, first, second, name, place)
    changed = [new if animal == old else animal for animal in (first, second)]
    after = sentence.format(colour, changed[0], changed[1], name, place)
    user = rng.choice((f"Replace {old} with {new}: {before}", f"Change the word {old} to {new} in this text: {before}"))
    answer = f"Here is the text with {new} for {old}:\n{after}"
    return [Turn(user, answer, after)]


def story(rng: random.Random) -> list[Turn]:
    adjective, animal, place = (
        rng.choice(words.ADJECTIVES),
        rng.choice(words.ANIMALS),
        rng.choice(words.PLACES),
    )
    name, treasure = _name(rng), rng.choice(words.TREASURES)
    user = rng.choice(
        (
            f"Tell me a short story about a {adjective} {animal} called {name}.",
            f"Write a story: {name}, a {adjective} {animal}, and the {place}.",
            f"Tell a story about the {animal} {name} who finds {treasure}.",
        )
    )
    friend = rng.choice(words.ANIMALS)
    ending = rng.choice(("very happy", "tired but glad", "home before dark", "best friends"))
    answer = (
        f"Once upon a time there was a {adjective} {animal} called {name} who lived near the {place}. "
        f"One day {name} found {treasure} under a tree. A {friend} came by and asked for help. "
        f"{name} gave {treasure} to the {friend}, and in the evening they were {ending}."
    )
    return [Turn(user, answer)]


def remembering(rng: random.Random) -> list[Turn]:
    name, city, hobby, job = (
        _name(rng),
        rng.choice(words.CITIES),
        rng.choice(words.HOBBIES),
        rng.choice(words.JOBS),
    )
    hello = rng.choice(
        (
            f"Hi, I am {name}, a {job} from {city}, and I like {hobby}.",
            f"Hello! My name is {name}. I live in {city}, work as a {job} and enjoy {hobby}.",
        )
    )
    greeting = (
        f"Hello {name}, nice to meet you! It must be interesting to work as a {job} in {city}. "
        f"How long have you liked {hobby}?"
    )
    turns = [Turn(hello, greeting, f"Hello {name}")]
    questions = [
        ("What is my name?", f"Your name is {name}, as you told me at the start."),
        ("Where do I live?", f"You live in {city}, {name}. You also said that you like {hobby}."),
        ("What is my job?", f"You work as a {job} in {city}, {name}."),
        ("What do I do in my free time?", f"In your free time you enjoy {hobby}, {name}."),
    ]
    return turns + [Turn(question, reply, reply) for question, reply in rng.sample(questions, rng.randint(1, 2))]


def booking(rng: random.Random) -> list[Turn]:
    name, people, hour = _name(rng), rng.randint(2, 9), rng.randint(5, 10)
    later, more = rng.randint(1, 2), rng.randint(1, 4)
    first = rng.choice(
        (
            f"Please book a table for {people} at {hour} for {name}.",
            f"I need a table at {hour} for {people} people, the name is {name}.",
        )
    )
    answer = (
        f"Your table is booked.\n- Name: {name}\n- People: {people}\n- Time: {hour}:00\nCan I do anything else for you?"
    )
    changes = [
        (f"We are {more} more people.", people + more, hour),
        (f"Make it {later} hours later.", people, hour + later),
        (f"{more} more people, and {later} hours later.", people + more, hour + later),
    ]
    second, people, hour = rng.choice(changes)
    changed = (
        f"Your table has been changed.\n- Name: {name}\n- People: {people}\n- Time: {hour}:00\nSee you soon, {name}!"
    )
    return [Turn(first, answer, answer), Turn(second, changed, changed)]


def follow_up_list(rng: random.Random) -> list[Turn]:
    items = rng.sample(rng.choice((words.ANIMALS, words.OBJECTS)), rng.randint(3, 5))
    lines = "\n".join(f"{i}. {item}" for i, item in enumerate(items, 1))
    first = rng.choice(("Number these: {}.", "Make a numbered list of {}.")).format(", ".join(items))
    turns = [Turn(first, f"Here is the numbered list:\n{lines}", lines)]
    new = rng.choice(words.PLACES)
    request, result = rng.choice(
        (
            ("Now in reverse order.", items[::-1]),
            ("Now sort it.", sorted(items)),
            (f"Add {new} at the end.", [*items, new]),
            (f"Remove {items[1]}.", [items[0], *items[2:]]),
        )
    )
    lines = "\n".join(f"{i}. {item}" for i, item in enumerate(result, 1))
    turns.append(Turn(request, f"Here is the changed list:\n{lines}\nIt has {len(result)} items.", lines))
    return turns


def counting(rng: random.Random) -> list[Turn]:
    kinds = rng.sample(words.COLOURS, 3)
    row = [rng.choice(kinds) for _ in range(rng.randint(5, 9))]
    target = rng.choice(row)
    user = rng.choice(("How often does {} appear in: {}?", "Count {} in this row: {}.")).format(target, " ".join(row))
    seen, lines = 0, []
    for colour in row:
        seen += colour == target
        lines.append(f"{colour} {seen}")
    answer = f"Counting {target}: {', '.join(lines)}.\nAnswer: {target} appears {seen} time{'s' if seen > 1 else ''}."
    return [Turn(user, answer, f"Answer: {target} appears {seen} ")]


TASKS: tuple[Callable[[random.Random], list[Turn]], ...] = (
    gain_and_loss, boxes_of_things, chain_of_sums, comparing, sorting_numbers, sorting_words, reversing, spelling,
    json_object, json_table, python_list_code, python_sum_code, bullet_list, day_plan, replacing, story, remembering,
    booking, follow_up_list, counting,
)  # fmt: skip


def conversations(seed: int, count: int) -> Iterator[Conversation]:
    """Yield `count` conversations; the same seed gives the same ones. Every task comes equally often."""
    rng = random.Random(seed)
    for index in range(count):
        task = TASKS[index % len(TASKS)]
        yield Conversation(task.__name__, tuple(task(rng)))


def prompts(seed: int, count: int) -> list[list[str]]:
    """The user turns of `count` distinct conversations, in shuffled order of tasks; the same for the same seed."""
    found: dict[tuple[str, ...], None] = {}
    for conversation in conversations(seed, 4 * count):
        if len(found) == count:
            break
        found.setdefault(tuple(turn.user for turn in conversation.turns))
    turns = [list(user_turns) for user_turns in found]
    random.Random(seed).shuffle(turns)
    return turns
